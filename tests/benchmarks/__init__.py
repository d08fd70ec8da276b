"""Tests of the benchmarks' programs; what they measure is not judged here."""
