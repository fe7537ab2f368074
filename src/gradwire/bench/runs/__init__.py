"""Runs on emulated hosts: training, step times, guards and changing links, case by case."""
