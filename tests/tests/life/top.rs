//! `firn top` on a terminal, while eight writers write checkpoints. The picture of the guide is made of its screen.
//!
//! Needs root and FUSE. With `FIRN_RECORD=1` `docs/figures/top.svg` is written.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_tests::command::run;
use firn_tests::mount::SMALL;
use firn_tests::terminal::{OnTerminal, svg_of};
use firn_tests::{FirnMount, Sandbox};

const WRITERS: usize = 8;
/// Bytes that a writer writes into its file of a step.
const FILE_BYTES: usize = 512 << 10;
/// Time between two files of a writer: a load that this machine carries, and whose rates have the unit of the picture.
const WRITE_EVERY: Duration = Duration::from_millis(700);
/// The first steps are durable before writers come.
const DURABLE_STEPS: usize = 2;
/// Writers keep that many steps: the screen has room for them and the durable ones, however late it comes.
const KEPT_STEPS: usize = 8;

/// Writes steps until it is stopped.
fn write_steps(top: &Path, writer: usize, stop: &AtomicBool) {
    let data = vec![writer as u8; FILE_BYTES];
    for step in DURABLE_STEPS + 1.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let dir = top.join(format!("step_{step}"));
        fs::create_dir_all(&dir).expect("make a step");
        fs::write(dir.join(format!("rank_{writer}")), &data).expect("write");
        if step > DURABLE_STEPS + KEPT_STEPS {
            let old = top.join(format!("step_{}", step - KEPT_STEPS));
            fs::remove_file(old.join(format!("rank_{writer}"))).expect("remove");
            // The last writer that leaves it can.
            let _ = fs::remove_dir(old);
        }
        std::thread::sleep(WRITE_EVERY);
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
    for step in 1..=DURABLE_STEPS {
        fs::create_dir(mount.join(format!("step_{step}"))).expect("make a step");
        let path = mount.join(format!("step_{step}/rank_0"));
        fs::write(path, vec![1; FILE_BYTES * WRITERS]).expect("write");
    }
    mount.wait("durable", mount.path()).ok();
    // The job that is shown is that of the chosen mount, whatever else the user has mounted.
    let other_sandbox = Sandbox::new("topother");
    let other = FirnMount::new(&other_sandbox, SMALL);
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
    other.umount();
    mount.umount();
}

fn watch(sandbox: &Sandbox, mount: &FirnMount<'_>) {
    let mut command = sandbox.firn(["top"]);
    // The picture has colours.
    command.env_remove("NO_COLOR");
    let mut screen = OnTerminal::start(&command, 80, 24);
    let text = screen.wait_for("checkpoints and rates", |text| {
        // Steps that are durable, and newer ones; bytes that go in and out; and no mount of another test.
        let has_steps = text.contains("step_2 ") && text.matches(" step_").count() >= 5;
        let has_rates = text.contains("MiB/s, most") && !text.contains("OUT 0 B/s");
        has_steps && has_rates && !text.contains(" asked")
    });
    assert!(text.starts_with("firn top  "), "{text}");
    let name = mount.path().to_str().expect("a name");
    assert!(text.contains(&name[..12]), "{text}");
    assert!(text.contains("q quit"), "{text}");
    let svg = screen.with(|parser| svg_of(parser.screen()));
    assert!(
        svg.contains("CHECKPOINT") && svg.contains("fill=\"#79c0ff\""),
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
    // As the table shows it: 22 columns, the last of which says that there is more.
    let cut: String = mount_point.chars().take(21).collect();
    let shown = format!("{:<22}", "/ckpt");
    let svg = svg.replace(&format!("{cut}…"), &shown);
    // Mounts of others on the machine that makes the picture.
    let others = regex::Regex::new(r", [0-9]+ with another FIRN_RUNTIME_DIR").expect("it is right");
    let svg = others.replace(&svg, |found: &regex::Captures<'_>| {
        " ".repeat(found[0].len())
    });
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/figures/top.svg");
    fs::write(path, svg.as_bytes()).expect("record");
}

/// Ctrl-C is a key, as the terminal is in raw mode; SIGTERM is none.
#[test]
fn ctrl_c_and_sigterm_give_the_terminal_back() {
    let sandbox = Sandbox::new("topend");
    // Root sees mounts of other tests too.
    let is_up = |text: &str| text.starts_with("firn top  ") && text.contains("q quit");
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
        .run([
            "top",
            "--once",
            "--size",
            "100x20",
            mount.path().to_str().unwrap(),
        ])
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
    let nowhere = run(&mut sandbox.firn(["top", "--once", "/nowhere"]));
    nowhere.code(10).says("/nowhere is not on a firn mount");
    let silent = run(&mut sandbox.firn(["top", "--once", mount.path().to_str().unwrap()]));
    firn_tests::sandbox::kill(pid, libc::SIGCONT);
    let shown = silent.ok().stdout;
    let name: String = mount.path().to_str().unwrap().chars().take(21).collect();
    assert!(shown.contains(&name), "{shown}");
    mount.umount();
}
