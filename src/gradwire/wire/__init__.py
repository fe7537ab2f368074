"""Wire formats: conversion of message parts to bytes and back (docs/reference/wire.md)."""
