//! Pacing of the I/O threads that write to the backing: limits their CPU time while no caller waits for them, in favour
//! of programs.
//!
//! Thread priorities do not solve this, for three reasons. A thread of another session or control group is not
//! affected by them (sched(7), "The autogroup feature"). An unprivileged process cannot raise a low priority again
//! when a caller begins to wait. A thread of low priority keeps a lock as long as it does not run.
//!
//! The I/O threads therefore measure the use of the CPUs. As long as some CPUs are idle, or programs compute on few
//! of them, the I/O threads have no limit. If programs compute and no CPU is idle, the I/O threads get the part of
//! one CPU that the option `drain-cpu` sets, whatever the number of CPUs. That part is small because the threads of a
//! program wait for each other in each step: the time that one thread loses is lost for the whole program.
//!
//! Promises
//! * While CPUs are idle, no job waits, except in the first twentieth of a second after all CPUs were busy.
//! * While all CPUs are busy, the I/O threads of a mount use no more than their part, except in the first twentieth
//!   of a second.
//!
//! Only drains without waiting callers call [`Pacer::delay`]. A job that must not be late never does.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::cpu::{CpuClock, CpuUse};

/// Interval between two measurements of the CPUs. It is long enough to measure with ticks of 10 ms.
const MEASURE_EVERY: Duration = Duration::from_millis(50);
/// If less than this fraction of all CPUs is idle, programs may want more of them.
const IDLE_FRACTION_MIN: f64 = 0.1;
/// If programs compute on less than this fraction of all CPUs, they have as many CPUs as they can use. Kernel time does
/// not count, because most of it is work of the drain: kernel threads carry the data to the device.
const USER_FRACTION_MIN: f64 = 0.25;
/// Maximum length of one sleep of a paced thread. After it the use of the CPUs is measured again.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// Paces the I/O threads of a mount.
pub(crate) struct Pacer {
    /// Number of CPUs that the I/O threads always get; less than one.
    budget_min: f64,
    state: Mutex<PacerState>,
}

struct PacerState {
    clock: CpuClock,
    /// Number of CPUs that the I/O threads may use. Infinite means no limit.
    budget: f64,
    /// CPU time of jobs since the last measurement.
    used_cpu_time: Duration,
    /// Time until which the used CPU time is within the budget; jobs without waiters are delayed until then.
    paid_until: Instant,
}

impl Pacer {
    /// Creates a pacer for I/O threads that take `percent` of a CPU while programs want all of them.
    ///
    /// Returns `None` if the threads have no limit: `percent` is 100 or more, or the kernel does not report the use
    /// of the CPUs.
    pub(crate) fn start(percent: u32) -> Option<Self> {
        if percent >= 100 {
            return None;
        }
        let clock = CpuClock::start()?;
        Some(Self {
            budget_min: f64::from(percent) / 100.0,
            state: Mutex::new(PacerState {
                clock,
                budget: f64::INFINITY,
                used_cpu_time: Duration::ZERO,
                paid_until: Instant::now(),
            }),
        })
    }

    /// Records the CPU time of a job. A job for which a caller waits (`is_awaited`) does not delay later jobs.
    pub(crate) fn charge(&self, used: Duration, is_awaited: bool) {
        let mut state = self.state.lock();
        state.used_cpu_time += used;
        if state.budget.is_finite() && !is_awaited {
            let start = state.paid_until.max(Instant::now());
            state.paid_until = start + used.div_f64(state.budget);
        }
    }

    /// Returns how long a job without waiters must be delayed. Returns `None` if it need not be.
    pub(crate) fn delay(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        state.update_budget(self.budget_min);
        let time_left = state.paid_until.saturating_duration_since(Instant::now());
        if time_left.is_zero() {
            return None;
        }
        Some(time_left.min(SLEEP_MAX))
    }
}

impl PacerState {
    /// Measures the CPUs if [`MEASURE_EVERY`] has passed, and sets the budget.
    fn update_budget(&mut self, budget_min: f64) {
        if self.clock.age() < MEASURE_EVERY {
            return;
        }
        let cpu_use = self.clock.measure();
        let used_cpu_time = std::mem::take(&mut self.used_cpu_time);
        self.budget = match cpu_use {
            Some(cpu_use) => next_budget(self.budget, cpu_use, used_cpu_time, budget_min),
            None => f64::INFINITY,
        };
        if self.budget.is_infinite() {
            self.paid_until = Instant::now();
        }
    }
}

/// Returns the number of CPUs that the I/O threads may use, after a measurement. `used_cpu_time` is that of their
/// jobs during the measurement; `budget` is the number of CPUs that they were allowed to use.
fn next_budget(budget: f64, cpu_use: CpuUse, used_cpu_time: Duration, budget_min: f64) -> f64 {
    let used_cpus = used_cpu_time.as_secs_f64() / cpu_use.elapsed.as_secs_f64();
    let spare_cpus = cpu_use.idle - cpu_use.cpus * IDLE_FRACTION_MIN;
    if cpu_use.user < cpu_use.cpus * USER_FRACTION_MIN {
        // Programs compute on few CPUs, so the I/O threads take nothing from them and need no limit.
        f64::INFINITY
    } else if spare_cpus < 0.0 {
        // Programs compute, and hardly any CPU is idle, so the I/O threads get their minimum.
        budget_min
    } else if budget.is_infinite() {
        // The I/O threads had no limit, and CPUs were idle nevertheless. So no limit is needed.
        budget
    } else {
        // The limit grows by the spare CPUs: the threads may use what they have used, and these CPUs too.
        (used_cpus + spare_cpus).max(budget_min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET_MIN: f64 = 0.03;

    /// Returns the budget after a measurement of two CPUs, of which the I/O threads used `own`, programs used `user`,
    /// and `idle` were idle.
    fn after(budget: f64, own: f64, user: f64, idle: f64) -> f64 {
        let cpu_use = CpuUse {
            cpus: 2.0,
            idle,
            user,
            elapsed: MEASURE_EVERY,
        };
        next_budget(budget, cpu_use, MEASURE_EVERY.mul_f64(own), BUDGET_MIN)
    }

    #[test]
    fn a_drain_beside_which_little_is_computed_has_no_limit() {
        // All CPUs are busy with the drain, and with threads of the kernel that carry its data.
        assert_eq!(after(f64::INFINITY, 1.2, 0.1, 0.0), f64::INFINITY);
        assert_eq!(after(BUDGET_MIN, BUDGET_MIN, 0.1, 0.0), f64::INFINITY);
        // A program with one thread and a drain with one thread.
        assert_eq!(after(f64::INFINITY, 0.7, 1.0, 0.3), f64::INFINITY);
    }

    #[test]
    fn a_drain_beside_a_program_that_computes_on_all_cpus_has_its_part() {
        assert_eq!(after(f64::INFINITY, 1.0, 0.9, 0.0), BUDGET_MIN);
        assert_eq!(after(BUDGET_MIN, BUDGET_MIN, 1.9, 0.05), BUDGET_MIN);
        assert_eq!(after(BUDGET_MIN, 0.0, 2.0, 0.0), BUDGET_MIN);
    }

    #[test]
    fn what_becomes_idle_can_be_had_at_once() {
        // The program has ended.
        assert_eq!(after(BUDGET_MIN, BUDGET_MIN, 0.0, 1.9), f64::INFINITY);
        // One of the two threads of the program has ended.
        let budget = after(BUDGET_MIN, BUDGET_MIN, 1.0, 0.97);
        assert!((0.75..1.0).contains(&budget), "{budget}");
    }

    #[test]
    fn who_uses_more_than_the_budget_waits_for_as_long() {
        let pacer = Pacer::start(3).expect("/proc/stat");
        pacer.state.lock().budget = 0.5;
        let used = Duration::from_millis(20);
        pacer.charge(used, true);
        assert_eq!(pacer.delay(), None);
        pacer.state.lock().budget = 0.5;
        pacer.charge(used, false);
        let paid_until = pacer.state.lock().paid_until;
        let wait = paid_until - Instant::now();
        assert!(wait > used && wait <= 2 * used, "{wait:?}");
    }

    #[test]
    fn at_a_hundred_percent_no_thread_looks_at_the_cpus() {
        assert!(Pacer::start(100).is_none());
    }
}
