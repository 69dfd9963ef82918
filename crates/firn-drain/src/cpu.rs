//! Measures the CPU time of the calling thread, and the use of the CPUs on which this process may run.
//!
//! Relies on /proc/stat (proc_stat(5)), which has the ticks of each CPU since boot by kind of use. In an OS container
//! the file also lists all CPUs of the host, so only the CPUs in this process's affinity are added up.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity};
use rustix::time::{ClockId, clock_gettime};

/// USER_HZ, which is the same on all architectures for which Firn is built.
const TICKS_PER_SECOND: f64 = 100.0;

/// Returns the CPU time that this thread has used.
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Use of the CPUs between two calls of [`CpuClock::measure`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CpuUse {
    /// Number of CPUs that this process may use.
    pub cpus: f64,
    /// Average number of these CPUs that were idle.
    pub idle: f64,
    /// Average number of these CPUs that ran programs, without the time in the kernel.
    pub user: f64,
    /// Time between the two calls.
    pub elapsed: Duration,
}

/// Measures the use of the CPUs of this process.
pub(crate) struct CpuClock {
    cpus: CpuSet,
    measured_at: Instant,
    ticks: Ticks,
}

/// Ticks of some CPUs since boot, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    user: u64,
}

impl CpuClock {
    /// Starts the measurement. Returns `None` if the kernel does not supply the numbers.
    pub(crate) fn start() -> Option<Self> {
        let cpus = sched_getaffinity(None).ok()?;
        Some(Self {
            cpus,
            measured_at: Instant::now(),
            ticks: Ticks::read(&cpus)?,
        })
    }

    /// Returns the time since the last call of [`CpuClock::measure`], or since the start.
    pub(crate) fn age(&self) -> Duration {
        self.measured_at.elapsed()
    }

    /// Returns the use of the CPUs since the last call, or since the start. Returns `None` if the kernel does not
    /// supply the numbers.
    pub(crate) fn measure(&mut self) -> Option<CpuUse> {
        let ticks = Ticks::read(&self.cpus)?;
        let now = Instant::now();
        let elapsed = now - self.measured_at;
        let cpu_count = f64::from(self.cpus.count());
        let average_cpus = |ticks_before: u64, ticks_now: u64| {
            // The time of waiting for I/O may decrease (proc_stat(5)).
            let seconds = ticks_now.saturating_sub(ticks_before) as f64 / TICKS_PER_SECOND;
            (seconds / elapsed.as_secs_f64()).min(cpu_count)
        };
        let cpu_use = CpuUse {
            cpus: cpu_count,
            idle: average_cpus(self.ticks.idle, ticks.idle),
            user: average_cpus(self.ticks.user, ticks.user),
            elapsed,
        };
        self.ticks = ticks;
        self.measured_at = now;
        Some(cpu_use)
    }
}

impl Ticks {
    fn read(cpus: &CpuSet) -> Option<Self> {
        let text = std::fs::read_to_string("/proc/stat").ok()?;
        Self::parse(&text, |cpu| cpu < CpuSet::MAX_CPU && cpus.is_set(cpu))
    }

    /// Returns the ticks of the CPUs that `is_ours` accepts. Returns `None` if the text has none of them.
    fn parse(text: &str, is_ours: impl Fn(usize) -> bool) -> Option<Self> {
        let mut total = None;
        for line in text.lines().take_while(|line| line.starts_with("cpu")) {
            let mut fields = line.split_ascii_whitespace();
            let cpu_number = fields.next()?.strip_prefix("cpu")?;
            // The first line is the sum of all CPUs.
            if cpu_number.is_empty() || !is_ours(cpu_number.parse().ok()?) {
                continue;
            }
            let mut next_field = || fields.next()?.parse::<u64>().ok();
            let [user, nice, _system] = [next_field()?, next_field()?, next_field()?];
            let [idle, waiting_for_io] = [next_field()?, next_field()?];
            let total = total.get_or_insert(Self::default());
            total.user += user + nice;
            total.idle += idle + waiting_for_io;
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  9 9 9 700 70 0 0 0 0 0\n\
                        cpu0 1 2 3 100 10 0 0 0 0 0\n\
                        cpu2 1 2 3 200 20 0 0 0 0 0\n\
                        cpu11 1 2 3 400 40 0 0 0 0 0\n\
                        intr 12 0 0\n";

    #[test]
    fn ticks_are_those_of_our_cpus() {
        let ticks = Ticks::parse(STAT, |cpu| cpu != 2);
        assert_eq!(ticks, Some(Ticks { idle: 550, user: 6 }));
        assert_eq!(Ticks::parse(STAT, |cpu| cpu == 1), None);
    }

    #[test]
    fn what_is_no_number_is_not_believed() {
        assert_eq!(Ticks::parse("cpu0 1 2 3 many 1", |_| true), None);
        assert_eq!(Ticks::parse("cpu0 1 2", |_| true), None);
        assert_eq!(Ticks::parse("", |_| true), None);
    }

    #[test]
    fn this_machine_says_what_its_cpus_do() {
        let mut clock = CpuClock::start().expect("/proc/stat");
        while clock.age() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let cpu_use = clock.measure().expect("/proc/stat");
        assert!(
            cpu_use.cpus >= 1.0 && cpu_use.idle <= cpu_use.cpus && cpu_use.user <= cpu_use.cpus
        );
        assert!(cpu_use.elapsed >= Duration::from_millis(20));
    }

    #[test]
    fn a_thread_that_computes_uses_cpu_time() {
        let before = thread_time();
        while thread_time() - before < Duration::from_millis(2) {
            std::hint::spin_loop();
        }
    }
}
