//! Benchmarks beside their baselines, measured in the same run.
