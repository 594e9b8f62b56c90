// SPDX-License-Identifier: GPL-2.0
// Stand-in for tests: a character device with a dynamic major, under the name that the real module uses.
#include <linux/fs.h>
#include <linux/module.h>

static int major;

static ssize_t uvm_read(struct file *file, char __user *buffer, size_t size, loff_t *offset)
{
	return 0;
}

static const struct file_operations uvm_fops = { .owner = THIS_MODULE, .read = uvm_read };

static int __init uvm_init(void)
{
	major = register_chrdev(0, "nvidia-uvm", &uvm_fops);
	return major < 0 ? major : 0;
}

static void __exit uvm_exit(void)
{
	unregister_chrdev(major, "nvidia-uvm");
}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_DESCRIPTION("Stand-in for nvidia-uvm");
MODULE_LICENSE("GPL");
