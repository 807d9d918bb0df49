"""Operations on whole checkpoints: conversion, comparison, verification, and the start of a training job."""
