// SPDX-License-Identifier: GPL-2.0
// Stand-in GPUs for tests. Two PCI Express host bridges, one per NUMA node, each with root ports and an NVIDIA
// display function (10de:2204, x16 at 16 GT/s) behind each port. Configuration space is memory with a mask of
// writable bits, so that MaxReadReq can be set, which QEMU's own devices do not allow.
//
// stuck: bit mask of GPUs that ignore a write of MaxReadReq. gone: bit mask of GPUs that read all ones.
#include <linux/module.h>
#include <linux/pci.h>

#define BRIDGES 2
#define MAX_PORTS 8
#define EXP 0x60 /* where the PCI Express capability is */

static int per = 2;
module_param(per, int, 0444);
MODULE_PARM_DESC(per, "GPUs per host bridge");
static uint stuck;
module_param(stuck, uint, 0644);
static uint gone;
module_param(gone, uint, 0644);

static const int first_bus[BRIDGES] = { 0xc0, 0xd0 };

struct function {
	u8 config[256];
	u8 writable[256];
};

static struct bridge {
	struct pci_bus *bus;
	struct pci_sysdata sysdata;
	struct resource buses;
	struct function port[MAX_PORTS];
	struct function gpu[MAX_PORTS];
	int index;
} bridges[BRIDGES];

static DEFINE_RAW_SPINLOCK(config_lock);

static void set16(u8 *space, int offset, u16 value)
{
	space[offset] = value;
	space[offset + 1] = value >> 8;
}

static void set32(u8 *space, int offset, u32 value)
{
	set16(space, offset, value);
	set16(space, offset + 2, value >> 16);
}

static void make_header(struct function *f, u16 vendor, u16 device, u32 class_revision)
{
	set16(f->config, PCI_VENDOR_ID, vendor);
	set16(f->config, PCI_DEVICE_ID, device);
	set16(f->writable, PCI_COMMAND, 0x0547);
	set16(f->config, PCI_STATUS, PCI_STATUS_CAP_LIST);
	set32(f->config, PCI_CLASS_REVISION, class_revision);
	f->config[PCI_CAPABILITY_LIST] = EXP;
	f->writable[PCI_CACHE_LINE_SIZE] = 0xff;
	f->writable[PCI_INTERRUPT_LINE] = 0xff;
}

static void make_express(struct function *f, u16 type, u32 device_capabilities, int slot)
{
	f->config[EXP] = PCI_CAP_ID_EXP;
	set16(f->config, EXP + PCI_EXP_FLAGS, type << 4 | 2);
	set32(f->config, EXP + PCI_EXP_DEVCAP, device_capabilities);
	set16(f->config, EXP + PCI_EXP_DEVCTL, 0x2810); /* MaxReadReq 512, MaxPayload 128 */
	set16(f->writable, EXP + PCI_EXP_DEVCTL, 0x7fff);
	set32(f->config, EXP + PCI_EXP_LNKCAP, 0x104 | slot << 24); /* x16, 16 GT/s */
	set16(f->writable, EXP + PCI_EXP_LNKCTL, 0x0fc3);
	set16(f->config, EXP + PCI_EXP_LNKSTA, 0x104);
	set32(f->config, EXP + PCI_EXP_DEVCAP2, 0x1f);
	set32(f->config, EXP + PCI_EXP_LNKCAP2, 0x1e);
	set16(f->config, EXP + PCI_EXP_LNKCTL2, 4);
}

static void make_port(struct function *f, int bus, int slot)
{
	make_header(f, PCI_VENDOR_ID_AMD, 0x1483, PCI_CLASS_BRIDGE_PCI << 16 | 0xa1);
	f->config[PCI_HEADER_TYPE] = PCI_HEADER_TYPE_BRIDGE;
	f->config[PCI_PRIMARY_BUS] = bus;
	f->config[PCI_SECONDARY_BUS] = bus + 1 + slot;
	f->config[PCI_SUBORDINATE_BUS] = bus + 1 + slot;
	memset(f->writable + PCI_PRIMARY_BUS, 0xff, 3);
	set16(f->writable, PCI_BRIDGE_CONTROL, 0x7f);
	set16(f->config, PCI_IO_BASE, 0x00f0); /* all windows closed */
	set32(f->config, PCI_MEMORY_BASE, 0x0000fff0);
	set32(f->config, PCI_PREF_MEMORY_BASE, 0x0000fff0);
	make_express(f, PCI_EXP_TYPE_ROOT_PORT, 0x8002, slot); /* MaxPayload 512 */
}

static void make_gpu(struct function *f, int slot)
{
	make_header(f, PCI_VENDOR_ID_NVIDIA, 0x2204, PCI_CLASS_DISPLAY_VGA << 16 | 0xa1);
	set16(f->config, PCI_SUBSYSTEM_VENDOR_ID, PCI_VENDOR_ID_NVIDIA);
	set16(f->config, PCI_SUBSYSTEM_ID, 0x1454);
	make_express(f, PCI_EXP_TYPE_ENDPOINT, 0x8021, slot); /* MaxPayload 256, extended tags */
}

/* Return the function at an address; *gpu is its number, -1 for a port. */
static struct function *find(struct pci_bus *bus, unsigned int devfn, int *gpu)
{
	struct bridge *b = container_of((struct pci_sysdata *)bus->sysdata, struct bridge, sysdata);
	int below = bus->number - first_bus[b->index];
	int slot = PCI_SLOT(devfn);

	*gpu = -1;
	if (PCI_FUNC(devfn))
		return NULL;
	if (below == 0)
		return slot >= 1 && slot <= per ? &b->port[slot - 1] : NULL;
	if (slot || below < 1 || below > per)
		return NULL;
	*gpu = b->index * per + below - 1;
	return gone & (1u << *gpu) ? NULL : &b->gpu[below - 1];
}

static int config_read(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	int gpu;
	struct function *f = find(bus, devfn, &gpu);

	*value = ~0u;
	if (!f)
		return PCIBIOS_DEVICE_NOT_FOUND;
	*value = 0;
	if (where < sizeof(f->config))
		memcpy(value, f->config + where, size);
	return PCIBIOS_SUCCESSFUL;
}

static int config_write(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	int gpu, i;
	unsigned long flags;
	struct function *f = find(bus, devfn, &gpu);

	if (!f)
		return PCIBIOS_DEVICE_NOT_FOUND;
	raw_spin_lock_irqsave(&config_lock, flags);
	for (i = 0; i < size && where + i < sizeof(f->config); i++) {
		u8 mask = f->writable[where + i];

		if (gpu >= 0 && (stuck & (1u << gpu)) && where + i == EXP + PCI_EXP_DEVCTL + 1)
			mask &= ~(PCI_EXP_DEVCTL_READRQ >> 8);
		f->config[where + i] = (f->config[where + i] & ~mask) | ((value >> (8 * i)) & mask);
	}
	raw_spin_unlock_irqrestore(&config_lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops ops = { .read = config_read, .write = config_write };

static int add_bridge(struct bridge *b, int index)
{
	LIST_HEAD(resources);
	struct pci_bus *child;
	int i;

	b->index = index;
	b->sysdata.domain = 0;
	b->sysdata.node = index;
	b->buses = (struct resource){
		.name = "fakegpu", .start = first_bus[index], .end = first_bus[index] + 15, .flags = IORESOURCE_BUS,
	};
	for (i = 0; i < per; i++) {
		make_port(&b->port[i], first_bus[index], i);
		make_gpu(&b->gpu[i], i);
	}
	pci_add_resource(&resources, &b->buses);
	b->bus = pci_create_root_bus(NULL, first_bus[index], &ops, &b->sysdata, &resources);
	if (!b->bus) {
		pci_free_resource_list(&resources);
		return -ENODEV;
	}
	pci_scan_child_bus(b->bus);
	list_for_each_entry(child, &b->bus->children, node)
		pcie_bus_configure_settings(child);
	pci_bus_add_devices(b->bus);
	return 0;
}

static int __init fakegpu_init(void)
{
	int index, error = 0;

	per = clamp(per, 1, MAX_PORTS);
	pci_lock_rescan_remove();
	for (index = 0; index < BRIDGES && !error; index++)
		error = add_bridge(&bridges[index], index);
	pci_unlock_rescan_remove();
	return error;
}

static void __exit fakegpu_exit(void)
{
	int index;

	pci_lock_rescan_remove();
	for (index = 0; index < BRIDGES; index++) {
		if (!bridges[index].bus)
			continue;
		pci_stop_root_bus(bridges[index].bus);
		pci_remove_root_bus(bridges[index].bus);
	}
	pci_unlock_rescan_remove();
}

module_init(fakegpu_init);
module_exit(fakegpu_exit);
MODULE_DESCRIPTION("Stand-in GPUs");
MODULE_LICENSE("GPL");
