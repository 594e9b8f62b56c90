# SPDX-License-Identifier: GPL-3.0-or-later
"""The logic of the host tuner, free of Ansible: plain Python 3.9, standard library only."""
