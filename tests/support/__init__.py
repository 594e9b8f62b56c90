# SPDX-License-Identifier: GPL-3.0-or-later
"""What several test files need."""
