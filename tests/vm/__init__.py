# SPDX-License-Identifier: GPL-3.0-or-later
"""A Debian virtual machine under software emulation, with a real boot loader and real reboots."""
