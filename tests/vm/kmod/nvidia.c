// SPDX-License-Identifier: GPL-2.0
// Stand-in for tests: the static major 195, and a PCI driver of that name for the stand-in GPUs.
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pci.h>

#define NVIDIA_MAJOR 195

static ssize_t nv_read(struct file *file, char __user *buffer, size_t size, loff_t *offset)
{
	return 0;
}

static const struct file_operations nv_fops = { .owner = THIS_MODULE, .read = nv_read };

static const struct pci_device_id nv_ids[] = {
	{ .vendor = PCI_VENDOR_ID_NVIDIA, .device = PCI_ANY_ID, .subvendor = PCI_ANY_ID, .subdevice = PCI_ANY_ID,
	  .class = PCI_CLASS_DISPLAY_VGA << 8, .class_mask = 0xff0000 },
	{ }
};

static int nv_probe(struct pci_dev *device, const struct pci_device_id *id)
{
	return 0;
}

static void nv_remove(struct pci_dev *device)
{
}

static struct pci_driver nv_driver = {
	.name = "nvidia", .id_table = nv_ids, .probe = nv_probe, .remove = nv_remove,
};

static int __init nv_init(void)
{
	int error = register_chrdev(NVIDIA_MAJOR, "nvidia", &nv_fops);

	if (error < 0)
		return error;
	error = pci_register_driver(&nv_driver);
	if (error)
		unregister_chrdev(NVIDIA_MAJOR, "nvidia");
	return error;
}

static void __exit nv_exit(void)
{
	pci_unregister_driver(&nv_driver);
	unregister_chrdev(NVIDIA_MAJOR, "nvidia");
}

module_init(nv_init);
module_exit(nv_exit);
MODULE_DEVICE_TABLE(pci, nv_ids);
MODULE_DESCRIPTION("Stand-in for nvidia");
MODULE_LICENSE("GPL");
