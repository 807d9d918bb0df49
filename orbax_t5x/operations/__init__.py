"""Whole checkpoints: conversion."""
