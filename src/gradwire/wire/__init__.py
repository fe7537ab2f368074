"""Wire formats: conversion of message parts to bytes and back (described in docs/wire.md)."""
