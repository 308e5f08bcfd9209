"""Prediction of the collectives of a step: data and context parallelism, experts, and matrices of Muon."""
