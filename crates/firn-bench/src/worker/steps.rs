//! Computes on all CPUs in steps, as a training loop does. A step ends when all threads have done their part of it.

use std::sync::Barrier;

use serde::{Deserialize, Serialize};

/// Number of values of one thread. They fit into the first-level cache of its CPU.
const NUMBERS: usize = 1024;
/// Number of passes over the values in one step, which take about 5 ms.
const PASSES: usize = 25_000;

/// A computation in steps.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Steps {
    /// Number of threads. Each of them does a part of every step.
    pub threads: usize,
    /// Number of steps.
    pub count: u64,
}

impl Steps {
    /// Runs all steps.
    pub fn run(&self) {
        let barrier = Barrier::new(self.threads);
        std::thread::scope(|scope| {
            for _ in 0..self.threads {
                scope.spawn(|| {
                    let mut numbers = [1.0f32; NUMBERS];
                    for _ in 0..self.count {
                        compute(&mut numbers);
                        barrier.wait();
                    }
                });
            }
        });
    }
}

/// Does one thread's part of a step.
fn compute(numbers: &mut [f32; NUMBERS]) {
    for _ in 0..PASSES {
        for number in numbers.iter_mut() {
            *number = *number * 0.999 + 0.001;
        }
        std::hint::black_box(&mut *numbers);
    }
}
