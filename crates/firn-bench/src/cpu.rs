//! Reads the processor time of processes, in seconds, with the nanosecond resolution of the scheduler.

/// Returns the processor time of all threads of process `pid`, including the ended ones. Returns 0 if there is no such
/// process.
pub fn seconds_of(pid: u32) -> f64 {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: `clock` is a valid place for the result; the call reads nothing else.
    if unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &mut clock) } != 0 {
        return 0.0;
    }
    clock_seconds(clock)
}

/// Returns the processor time of this process.
pub fn seconds_of_self() -> f64 {
    clock_seconds(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Returns the processor time of the children of this process that have ended and were waited for.
pub fn seconds_of_children() -> f64 {
    // SAFETY: all bits zero is a valid `rusage`, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Returns the time of a clock. Returns 0 for an unknown clock.
fn clock_seconds(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid place for the result. An unknown clock leaves it at zero.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Returns the time of the machine's monotonic clock in nanoseconds. The clock is the same for all processes.
pub fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
