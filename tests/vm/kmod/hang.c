// SPDX-License-Identifier: GPL-2.0
/* Hangs the machine when it is loaded: every CPU spins with interrupts off, and no panic brings it back. */
#include <linux/irqflags.h>
#include <linux/module.h>
#include <linux/printk.h>
#include <linux/smp.h>

static void spin(void *unused)
{
	local_irq_disable();
	for (;;)
		cpu_relax();
}

static int __init hang_init(void)
{
	/* By printk, which waits for the console: what a process wrote there may still be queued. */
	pr_emerg("This kernel hangs\n");
	on_each_cpu(spin, NULL, 0);
	return 0;
}

module_init(hang_init);
MODULE_DESCRIPTION("A kernel that hangs");
MODULE_LICENSE("GPL");
