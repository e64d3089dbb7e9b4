"""Functional emulators of targets whose hardware is not at hand: one package a target."""
