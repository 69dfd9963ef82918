//! `firn top` on a terminal, while eight writers write checkpoints. The picture of the guide is made of its screen.
//!
//! Needs root and FUSE. With `FIRN_RECORD=1` `docs/figures/top.svg` is written.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_tests::command::run;
use firn_tests::mount::SMALL;
use firn_tests::terminal::{OnTerminal, svg_of};
use firn_tests::{FirnMount, Sandbox};

const WRITERS: usize = 8;
/// Bytes that a writer writes into its file of a step.
const FILE_BYTES: usize = 512 << 10;

/// Writes steps until it is stopped.
fn write_steps(top: &Path, writer: usize, stop: &AtomicBool) {
    let data = vec![writer as u8; FILE_BYTES];
    for step in 1.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let dir = top.join(format!("step_{}", step % 6));
        fs::create_dir_all(&dir).expect("make a step");
        fs::write(dir.join(format!("rank_{writer}")), &data).expect("write");
    }
}

fn top(sandbox: &Sandbox, args: &[&str]) -> OnTerminal {
    let mut firn = sandbox.firn(["top"]);
    firn.args(args);
    OnTerminal::start(&firn, 80, 24)
}

#[test]
fn the_screen_shows_mounts_and_checkpoints_while_eight_writers_run() {
    let sandbox = Sandbox::new("top");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},close=held"));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (path, stop) = (mount.path(), &stop);
            scope.spawn(move || write_steps(path, writer, stop));
        }
        let watched = std::panic::catch_unwind(|| watch(&sandbox, &mount));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = watched {
            std::panic::resume_unwind(panic);
        }
    });
    mount.umount();
}

fn watch(sandbox: &Sandbox, mount: &FirnMount<'_>) {
    let mut command = sandbox.firn(["top"]);
    // The picture has colours.
    command.env_remove("NO_COLOR");
    let mut screen = OnTerminal::start(&command, 80, 24);
    let text = screen.wait_for("checkpoints and rates", |text| {
        text.contains("step_") && text.contains("MiB/s, most")
    });
    assert!(text.starts_with("firn top  "), "{text}");
    let name = mount.path().to_str().expect("a name");
    assert!(text.contains(&name[..12]), "{text}");
    assert!(text.contains("q quit"), "{text}");
    let svg = screen.with(|parser| svg_of(parser.screen()));
    assert!(
        svg.contains("CHECKPOINT") && svg.contains("fill=\"#7ee787\""),
        "{svg}"
    );
    record(&svg, name);
    // It adapts, shows help, pauses and goes to the job.
    screen.resize(120, 40);
    screen.wait_for("it adapts", |text| {
        text.lines()
            .next()
            .is_some_and(|line| line.chars().count() > 100)
    });
    screen.type_keys("?");
    screen.wait_for("help", |text| text.contains("this page"));
    screen.type_keys("?p");
    screen.wait_for("a pause", |text| text.contains("paused"));
    screen.type_keys("pj");
    screen.wait_for("the job", |text| text.contains("hosts 1 alive"));
    screen.type_keys("q");
    assert!(screen.wait_for_end().success());
    // The terminal is as it was: the normal screen, with a cursor.
    screen.with(|parser| {
        assert!(!parser.screen().alternate_screen());
        assert!(!parser.screen().hide_cursor());
    });
}

/// The picture of the guide, with names that every reader has.
fn record(svg: &str, mount_point: &str) {
    if std::env::var_os("FIRN_RECORD").is_none() {
        return;
    }
    let cut: String = mount_point.chars().take(13).collect();
    let shown = format!("{:<13}", "/ckpt");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/figures/top.svg");
    fs::write(path, svg.replace(&cut, &shown)).expect("record");
}

/// Ctrl-C is a key, as the terminal is in raw mode; SIGTERM is none.
#[test]
fn ctrl_c_and_sigterm_give_the_terminal_back() {
    let sandbox = Sandbox::new("topend");
    let is_up = |text: &str| text.contains("nothing of yours is mounted");
    let mut screen = top(&sandbox, &[]);
    screen.wait_for("an empty screen", is_up);
    screen.type_keys("\x03");
    assert!(screen.wait_for_end().success());
    let mut screen = top(&sandbox, &[]);
    screen.wait_for("an empty screen", is_up);
    firn_tests::sandbox::kill(screen.pid(), libc::SIGTERM);
    assert!(screen.wait_for_end().success());
    screen.with(|parser| assert!(!parser.screen().alternate_screen()));
}

#[test]
fn without_a_terminal_it_says_what_to_type_and_once_prints_one_screen() {
    let sandbox = Sandbox::new("toponce");
    let refused = sandbox.run(["top"]).code(2);
    for word in ["--once", "firn status --watch", "firn status --json"] {
        assert!(refused.stderr.contains(word), "{refused:?}");
    }
    let mount = FirnMount::new(&sandbox, SMALL);
    fs::create_dir(mount.join("step_7")).expect("mkdir");
    fs::write(mount.join("step_7/rank_0"), "data").expect("write");
    let shown = sandbox
        .run(["top", "--once", "--size", "100x20"])
        .ok()
        .stdout;
    assert_eq!(shown.lines().count(), 20, "{shown}");
    assert!(shown.contains(" step_7 "), "{shown}");
    assert!(
        shown.lines().all(|line| line.chars().count() <= 100),
        "{shown}"
    );
    // Of a firnd that is stopped there is an answer too.
    let pid = mount.pid();
    firn_tests::sandbox::kill(pid, libc::SIGSTOP);
    let silent = run(&mut sandbox.firn(["top", "--once"]));
    firn_tests::sandbox::kill(pid, libc::SIGCONT);
    assert!(silent.ok().stdout.contains("1 mount"));
    mount.umount();
}
