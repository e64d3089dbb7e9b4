"""Devices: what a Program runs on."""
