//! A program that computes on all CPUs in steps, as a training loop does: a step ends when all threads have done their
//! part of it.

use std::sync::Barrier;

use serde::{Deserialize, Serialize};

/// Numbers of one thread: they stay in its CPU's nearest cache.
const NUMBERS: usize = 1024;
/// Passes over them in a step: some 5 ms.
const PASSES: usize = 25_000;

/// How much is computed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Steps {
    /// Threads, each with a part of every step.
    pub threads: usize,
    /// Steps.
    pub count: u64,
}

impl Steps {
    /// Takes the steps.
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

fn compute(numbers: &mut [f32; NUMBERS]) {
    for _ in 0..PASSES {
        for number in numbers.iter_mut() {
            *number = *number * 0.999 + 0.001;
        }
        std::hint::black_box(&mut *numbers);
    }
}
