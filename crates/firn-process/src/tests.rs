use std::path::Path;

use super::*;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

fn limits(input: &[u8], after: Duration) -> Limits<'_> {
    Limits {
        input,
        output_bytes_max: 1 << 20,
        excess: ExcessOutput::Refuse,
        deadline: Instant::now() + after,
    }
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// Returns the number that a script wrote to a file.
fn read_pid(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    text.trim().to_owned()
}

/// Waits until a process has ended; a zombie that another parent has to reap counts as ended.
fn await_end(pid: &str) {
    let deadline = Instant::now() + LONG;
    while let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        if stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" Z"))
        {
            return;
        }
        assert!(Instant::now() < deadline, "process {pid} lives");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn assert_late(result: Result<EndedProgram, RunError>, begun: Instant) {
    assert!(matches!(result, Err(RunError::Late)), "{result:?}");
    assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
}

#[test]
fn a_program_gets_its_input_and_says_how_it_ended() {
    let ended = run(
        shell("cat; echo more >&2; exit 3"),
        limits(b"given\n", LONG),
    )
    .unwrap();
    assert_eq!(ended.output, b"given\nmore\n");
    assert_eq!(ended.status.code(), Some(3));
    let ended = run(shell("cat"), limits(b"", LONG)).unwrap();
    assert!(ended.status.success() && ended.output.is_empty());
}

#[test]
fn a_program_that_is_not_there_is_not_started() {
    let result = run(Command::new("/no/such/program"), limits(b"x", LONG));
    assert!(matches!(result, Err(RunError::Start(_))), "{result:?}");
}

#[test]
fn a_program_that_hangs_is_killed_and_reaped_at_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let begun = Instant::now();
    let script = format!("echo $$ > {}; exec sleep 1000", pid.display());
    assert_late(run(shell(&script), limits(b"", SHORT)), begun);
    assert!(!Path::new(&format!("/proc/{}", read_pid(&pid))).exists());
}

#[test]
fn a_program_that_ignores_sigterm_is_killed_with_what_it_started() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let begun = Instant::now();
    let script = format!(
        "trap '' TERM INT HUP; sleep 1000 & echo $! > {}; wait; sleep 1000",
        pid.display()
    );
    assert_late(run(shell(&script), limits(b"", SHORT)), begun);
    await_end(&read_pid(&pid));
}

#[test]
fn a_flood_of_output_is_refused_at_the_bound() {
    let result = run(Command::new("yes"), limits(b"", LONG));
    assert!(
        matches!(result, Err(RunError::TooMuch { .. })),
        "{result:?}"
    );
}

#[test]
fn a_flood_of_output_that_is_discarded_ends_at_the_deadline() {
    let begun = Instant::now();
    let mut flood = limits(b"", SHORT);
    flood.excess = ExcessOutput::Discard;
    assert_late(run(Command::new("yes"), flood), begun);
}

#[test]
fn the_beginning_of_a_long_output_is_kept() {
    let mut cut = limits(b"", LONG);
    (cut.excess, cut.output_bytes_max) = (ExcessOutput::Discard, 5);
    let ended = run(shell("echo 1234567; head -c 1000000 /dev/zero"), cut).unwrap();
    assert!(ended.status.success());
    assert_eq!(ended.output, b"12345");
}

#[test]
fn a_descendant_that_holds_the_output_delays_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let script = format!("sleep 1000 & echo $! > {}; echo said", pid.display());
    let begun = Instant::now();
    let ended = run(shell(&script), limits(b"", LONG)).unwrap();
    assert!(begun.elapsed() < LONG / 2);
    assert_eq!(ended.output, b"said\n");
    let pid = read_pid(&pid).parse().unwrap();
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn a_descendant_that_floods_the_output_delays_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let script = format!("yes & echo $! > {}", pid.display());
    let begun = Instant::now();
    let mut flood = limits(b"", LONG);
    flood.excess = ExcessOutput::Discard;
    let ended = run(shell(&script), flood).unwrap();
    assert!(ended.status.success() && begun.elapsed() < LONG / 2);
    // The output of `yes` is closed, so SIGPIPE ends it.
    await_end(&read_pid(&pid));
}

#[test]
fn input_longer_than_a_pipe_blocks_nothing() {
    let input = vec![b'x'; 1 << 20];
    let ended = run(Command::new("cat"), limits(&input, LONG)).unwrap();
    assert_eq!(ended.output, input);
    // The program writes much before it reads anything.
    let script = "head -c 500000 /dev/zero; wc -c";
    let ended = run(shell(script), limits(&input, LONG)).unwrap();
    assert!(ended.output.ends_with(b"1048576\n"));
}

#[test]
fn a_program_that_reads_nothing_of_its_input_ends_as_it_does() {
    let input = vec![b'x'; 1 << 20];
    let ended = run(shell("exec <&-; echo done"), limits(&input, LONG)).unwrap();
    assert!(ended.status.success());
    assert_eq!(ended.output, b"done\n");
}
