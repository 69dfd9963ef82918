//! Leaves the CPUs to programs: how much CPU time the IO threads take while no caller waits for them.
//!
//! Priorities would not do. A thread of another session or control group does not feel them (sched(7), "The autogroup
//! feature"). An unprivileged process cannot take a low one back when a caller begins to wait. A thread of low priority
//! keeps a lock for as long as it is not run. So the IO threads look at the CPUs. As long as some are idle, or programs
//! compute on few, the IO threads have no limit. Where programs compute and nothing is idle, they get what the option
//! `drain-cpu` sets: a part of one CPU, however many there are. The threads of a program wait for each other in each
//! step, so what one thread loses the whole program loses.
//!
//! Promises
//! * Where CPUs are idle no job waits, but for the first twentieth of a second after all were wanted.
//! * Where all are wanted, the IO threads of a mount use no more than their part, but for the first twentieth of a second.
//!
//! A job that must not be late does not ask: [`Pacer::delay`] is for drains without waiters.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::cpu::{CpuClock, Window};

/// Between two looks at the CPUs: long enough that ticks of 10 ms say something.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Where less than this part of all CPUs is idle, a program may want more of them.
const IDLE_PART_MIN: f64 = 0.1;
/// Where programs compute on less than this part of all CPUs, they have what they want. What the kernel does is mostly
/// for the drain: its threads carry the data on to the device.
const USER_PART_MIN: f64 = 0.25;
/// Longest sleep for CPU time that was used: it is looked again then.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// Paces the IO threads of a mount.
pub(crate) struct Pacer {
    /// CPUs that the IO threads have in any case: less than one.
    least: f64,
    state: Mutex<PacerState>,
}

struct PacerState {
    clock: CpuClock,
    /// CPUs that the IO threads may use; infinite: as many as they like.
    budget: f64,
    /// CPU time of jobs since the last look.
    used: Duration,
    /// Until then the CPU time used is paid for.
    paid_until: Instant,
}

impl Pacer {
    /// For IO threads that take `percent` of a CPU where programs want all of them. `None`: they have no limit, because it
    /// is 100 or more, or because the kernel does not say what becomes of the CPUs.
    pub(crate) fn start(percent: u32) -> Option<Self> {
        let clock = (percent < 100).then(CpuClock::start).flatten()?;
        Some(Self {
            least: f64::from(percent) / 100.0,
            state: Mutex::new(PacerState {
                clock,
                budget: f64::INFINITY,
                used: Duration::ZERO,
                paid_until: Instant::now(),
            }),
        })
    }

    /// A job used this much CPU time. An awaited job (`is_awaited`) does not delay the next ones.
    pub(crate) fn charge(&self, used: Duration, is_awaited: bool) {
        let mut state = self.state.lock();
        state.used += used;
        if state.budget.is_finite() && !is_awaited {
            let from = state.paid_until.max(Instant::now());
            state.paid_until = from + used.div_f64(state.budget);
        }
    }

    /// How long a job without waiters is to be put off; `None`: not at all.
    pub(crate) fn delay(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        state.look(self.least);
        let left = state.paid_until.saturating_duration_since(Instant::now());
        (!left.is_zero()).then(|| left.min(SLEEP_MAX))
    }
}

impl PacerState {
    /// Looks at the CPUs if it is time, and sets the budget.
    fn look(&mut self, least: f64) {
        if self.clock.age() < LOOK_EVERY {
            return;
        }
        let window = self.clock.look();
        let used = std::mem::take(&mut self.used);
        let next = |window| next_budget(self.budget, window, used, least);
        self.budget = window.map_or(f64::INFINITY, next);
        if self.budget.is_infinite() {
            self.paid_until = Instant::now();
        }
    }
}

/// CPUs that the IO threads may use after a window in which their jobs used `used` of CPU time.
fn next_budget(budget: f64, window: Window, used: Duration, least: f64) -> f64 {
    let own = used.as_secs_f64() / window.elapsed.as_secs_f64();
    let spare = window.idle - window.cpus * IDLE_PART_MIN;
    if window.user < window.cpus * USER_PART_MIN {
        f64::INFINITY
    } else if spare < 0.0 {
        least
    } else if budget.is_infinite() {
        // Nothing was missing.
        budget
    } else {
        (own + spare).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: f64 = 0.03;

    /// The budget after a window with two CPUs, in which the IO threads used `own` of them, programs computed on `user`,
    /// and `idle` were idle.
    fn after(budget: f64, own: f64, user: f64, idle: f64) -> f64 {
        let window = Window {
            cpus: 2.0,
            idle,
            user,
            elapsed: LOOK_EVERY,
        };
        next_budget(budget, window, LOOK_EVERY.mul_f64(own), LEAST)
    }

    #[test]
    fn a_drain_beside_which_little_is_computed_has_no_limit() {
        // All CPUs are busy with the drain, and with threads of the kernel that carry its data.
        assert_eq!(after(f64::INFINITY, 1.2, 0.1, 0.0), f64::INFINITY);
        assert_eq!(after(LEAST, LEAST, 0.1, 0.0), f64::INFINITY);
        // A program with one thread, beside a drain with one.
        assert_eq!(after(f64::INFINITY, 0.7, 1.0, 0.3), f64::INFINITY);
    }

    #[test]
    fn a_drain_beside_a_program_that_computes_on_all_cpus_has_its_part() {
        assert_eq!(after(f64::INFINITY, 1.0, 0.9, 0.0), LEAST);
        assert_eq!(after(LEAST, LEAST, 1.9, 0.05), LEAST);
        assert_eq!(after(LEAST, 0.0, 2.0, 0.0), LEAST);
    }

    #[test]
    fn what_becomes_idle_can_be_had_at_once() {
        // The program has ended.
        assert_eq!(after(LEAST, LEAST, 0.0, 1.9), f64::INFINITY);
        // One of its two threads has.
        let budget = after(LEAST, LEAST, 1.0, 0.97);
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
