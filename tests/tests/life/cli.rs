//! The command line: fstab, exit codes, JSON, metrics, help.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use firn_tests::command::wait_child;
use firn_tests::mount::{SMALL, status_of};
use firn_tests::sandbox::{firn_binary, is_mounted};
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, run};

/// `/sbin/mount.firn` for as long as the value lives, as an installation makes it.
struct Helper {
    made: bool,
    _only_one: MutexGuard<'static, ()>,
}

const HELPER: &str = "/sbin/mount.firn";
static HELPER_LOCK: Mutex<()> = Mutex::new(());

impl Helper {
    fn install() -> Self {
        let only_one = HELPER_LOCK
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let made = !Path::new(HELPER).exists();
        if made {
            fs::remove_file(HELPER).ok();
            symlink(fs::canonicalize(firn_binary()).expect("the binary"), HELPER)
                .expect("symlink mount.firn");
        }
        Self {
            made,
            _only_one: only_one,
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if self.made {
            fs::remove_file(HELPER).ok();
        }
    }
}

fn in_sandbox(sandbox: &Sandbox, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    sandbox.environment(&mut command);
    command.args(args);
    command
}

#[test]
fn mount_a_mounts_an_fstab_line() {
    let sandbox = Sandbox::new("fstab");
    let _helper = Helper::install();
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    let fstab = sandbox.join("fstab");
    let options = format!("{SMALL},close=held,_netdev,nofail,noauto,user,x-systemd.automount");
    let line = |options: &str| {
        format!(
            "{} {} firn {options} 0 0\n",
            backing.display(),
            point.display()
        )
    };
    fs::write(&fstab, line(&options.replace("noauto,", ""))).expect("write the fstab");
    run(&mut in_sandbox(
        &sandbox,
        "mount",
        &["-a", "-T", fstab.to_str().expect("UTF-8")],
    ))
    .ok();
    assert!(
        is_mounted(&point),
        "mount -a returned before the mount was usable"
    );
    let status = status_of(&sandbox, &point);
    assert!(
        status.options.iter().any(|option| option == "close=held"),
        "{:?}",
        status.options
    );
    fs::write(point.join("file"), "text").expect("write");
    // umount(8) is what an administrator types; firnd drains and ends by itself then.
    run(Command::new("umount").arg(&point)).ok();
    firn_tests::wait_until(
        "firnd ends after umount(8)",
        Duration::from_secs(30),
        || firn_tests::sandbox::is_zombie(status.pid),
    );
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"text");
}

/// Proves S-error-8, S-error-16, S-error-17.
#[test]
fn regression_firnd_has_let_go_of_the_backing_when_firn_umount_returns() {
    let sandbox = Sandbox::new("letgo");
    let by_helper = sandbox.join("umount.fuse.firn");
    symlink(
        fs::canonicalize(firn_binary()).expect("the binary"),
        &by_helper,
    )
    .expect("symlink");
    for round in 0..12 {
        let image = LoopImage::new(&sandbox, FsKind::Tmpfs, 64);
        let mount = FirnMount::over(&sandbox, image.path(), &format!("{SMALL},close=held"));
        fs::write(mount.join("file"), vec![1; 3 << 20]).expect("write");
        let point = mount.path().as_os_str();
        match round % 3 {
            0 => sandbox.run(["umount".as_ref(), point]).ok(),
            1 => sandbox
                .run(["umount".as_ref(), "--force".as_ref(), point])
                .ok(),
            _ => run(in_sandbox(&sandbox, by_helper.to_str().expect("UTF-8"), &["-n"]).arg(point))
                .ok(),
        };
        assert!(
            firn_tests::sandbox::is_zombie(mount.pid()),
            "round {round}: firnd still runs"
        );
        assert_eq!(
            fs::metadata(image.path().join("file")).expect("stat").len(),
            3 << 20
        );
        // Not lazily: a process with an open file there keeps it from being unmounted.
        let unmounted = rustix::mount::unmount(image.path(), rustix::mount::UnmountFlags::empty());
        assert_eq!(unmounted, Ok(()), "round {round}");
    }
}

#[test]
fn mount_firn_has_the_exit_codes_of_mount_8() {
    let sandbox = Sandbox::new("mountfirn");
    let _helper = Helper::install();
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    let backing = backing.to_str().expect("UTF-8");
    let point = point.to_str().expect("UTF-8");
    run(&mut in_sandbox(
        &sandbox,
        HELPER,
        &[backing, point, "-o", "no-such-option"],
    ))
    .code(1);
    run(&mut in_sandbox(
        &sandbox,
        HELPER,
        &["/no/such/backing", point],
    ))
    .code(32);
    run(&mut in_sandbox(
        &sandbox,
        HELPER,
        &[backing, point, "-f", "-v", "-o", "rw"],
    ))
    .ok();
    assert!(!is_mounted(Path::new(point)), "-f mounted");
    run(&mut in_sandbox(
        &sandbox,
        HELPER,
        &[backing, point, "-s", "-n", "-o", "rw,no-such-option"],
    ))
    .ok();
    assert!(is_mounted(Path::new(point)), "-s tolerates unknown options");
    sandbox.run(["umount", point]).ok();
}

/// Proves S-fsync-5.
#[test]
fn status_wait_and_drain_answer_in_json() {
    let sandbox = Sandbox::new("json");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},close=held,drain-age=10min"));
    fs::create_dir(mount.join("step")).expect("mkdir");
    fs::write(mount.join("step/file"), vec![1; 12_345]).expect("write");
    let status = mount.status();
    assert_eq!(status.held_bytes, 12_345);
    assert_eq!(status.held_files, 1);
    assert_eq!(status.mount_point.as_path(), mount.path());
    assert_eq!(status.backing.as_path(), mount.backing());
    assert_eq!(status.arena_bytes, 32 << 20);
    let step = mount.join("step").to_string_lossy().into_owned();
    sandbox
        .run(["wait", "--until", "durable", "--json", &step])
        .ok()
        .json();
    sandbox.run(["drain", "--json", &step]).ok().json();
    assert_eq!(mount.status().held_bytes, 0);
    let file = sandbox
        .run(["status", "--json", &format!("{step}/file")])
        .ok();
    file.json();
    mount.umount();
}

#[test]
fn machine_readable_verbs_print_nothing_but_json() {
    let sandbox = Sandbox::new("json2");
    sandbox.run(["version", "--json"]).ok().json();
    let config = sandbox.run(["config", "--json"]).ok();
    config.json();
    assert!(config.stdout.contains("arena-size"), "{config}");
    assert!(config.stderr.is_empty(), "{config}");
}

#[test]
fn metrics_are_prometheus_text() {
    let sandbox = Sandbox::new("metrics");
    let mount = FirnMount::new(&sandbox, SMALL);
    fs::write(mount.join("file"), vec![1; 5000]).expect("write");
    let text = sandbox
        .run([
            "status".as_ref(),
            "--metrics".as_ref(),
            mount.path().as_os_str(),
        ])
        .ok()
        .stdout;
    for line in text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
    {
        let (name, value) = line
            .rsplit_once(' ')
            .unwrap_or_else(|| panic!("no value: {line}"));
        assert!(name.starts_with("firn_"), "{line}");
        value
            .parse::<f64>()
            .unwrap_or_else(|_| panic!("not a number: {line}"));
    }
    assert!(
        text.contains("# TYPE firn_") && text.contains("ingest"),
        "{text}"
    );
    mount.umount();
}

#[test]
fn config_shows_each_value_and_where_it_came_from() {
    let sandbox = Sandbox::new("config");
    let mut command = sandbox.firn(["config"]);
    let outcome = run(command.env("FIRN_IO_THREADS", "7")).ok();
    let line = outcome
        .stdout
        .lines()
        .find(|line| line.contains("io-threads"));
    let line = line.unwrap_or_else(|| panic!("no io-threads: {outcome}"));
    assert!(
        line.contains('7') && line.to_lowercase().contains("env"),
        "{line}"
    );
}

#[test]
fn help_version_man_pages_and_completions_are_printed() {
    let sandbox = Sandbox::new("help");
    for args in [
        &["--help"][..],
        &["mount", "--help"],
        &["--version"],
        &["version"],
        &["man"],
    ] {
        assert!(!sandbox.run(args).ok().stdout.is_empty(), "{args:?}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            sandbox
                .run(["completions", shell])
                .ok()
                .stdout
                .contains("firn")
        );
    }
}

/// `firn`, `firn help` and `firn --help` are one text, and a word of another program leads to ours.
#[test]
fn help_is_one_text_and_words_of_other_programs_lead_to_a_verb() {
    let sandbox = Sandbox::new("words");
    let alone = sandbox.run([""; 0]).ok().stdout;
    for word in ["help", "--help", "-h"] {
        assert_eq!(sandbox.run([word]).ok().stdout, alone, "firn {word}");
    }
    assert!(
        alone.contains("firn umount /ckpt") && alone.contains("\nEvery day\n  mount "),
        "{alone}"
    );
    sandbox
        .run(["stop", "/ckpt"])
        .code(2)
        .says("did you mean `umount`?");
    sandbox
        .run(["iostat"])
        .code(2)
        .says("did you mean `top` (a screen) or `status --watch`?");
}

/// The verbs that wait say on stderr what they waited for, and nothing with `--quiet` or `--json`.
#[test]
fn verbs_that_wait_end_with_a_summary() {
    let sandbox = Sandbox::new("summary");
    let mount = FirnMount::new(&sandbox, &format!("{SMALL},close=held,drain=demand"));
    let point = mount.path().as_os_str();
    let write = |name: &str| fs::write(mount.join(name), vec![1; 3 << 19]).expect("write");
    let told = |args: &[&str]| {
        let args = args.iter().map(|arg| arg.as_ref()).chain([point]);
        sandbox.run(args).ok().stderr
    };
    write("a");
    write("b");
    let durable = told(&["wait"]);
    assert!(
        durable.contains(" is durable: 3.0 MiB in 2 files were left to write, "),
        "{durable}"
    );
    let again = told(&["wait", "--until", "drained"]);
    assert!(again.contains("nothing was left to write"), "{again}");
    write("c");
    assert!(told(&["drain"]).starts_with("firn: draining 1.5 MiB in 1 file; "));
    for quiet in [
        &["wait", "--quiet"][..],
        &["wait", "--json"],
        &["drain", "-q"],
        &["drain", "--wait", "--quiet"],
    ] {
        assert_eq!(told(quiet), "", "{quiet:?}");
    }
    write("d");
    let unmounted = told(&["umount"]);
    assert!(
        unmounted.contains(": 1.5 MiB in 1 file were left to write, "),
        "{unmounted}"
    );
}

/// What bash puts for a line that is typed so far, by the function of the script.
#[test]
fn bash_completes_options_after_commas_and_mount_points() {
    let sandbox = Sandbox::new("complete");
    let mount = FirnMount::new(&sandbox, SMALL);
    let script = sandbox.run(["completions", "bash"]).ok().stdout;
    let file = sandbox.join("firn.bash");
    fs::write(&file, script).expect("write the script");
    // As readline calls it: words are cut at blanks and at `=`.
    let complete = |line: &str| {
        let ask = r#"
            source "$1"; COMP_LINE=$2; COMP_POINT=${#2}
            words=${2//=/ = }; read -ra COMP_WORDS <<<"$words"
            [[ $2 == *[\ =] ]] && COMP_WORDS+=("")
            COMP_WORDS[0]=$FIRN
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _firn_words "$FIRN" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
            printf '%s\n' "${COMPREPLY[@]}""#;
        let mut bash = Command::new("bash");
        sandbox.environment(&mut bash);
        bash.env("FIRN", fs::canonicalize(firn_binary()).expect("the binary"));
        let outcome = run(bash.args(["-c", ask, "bash"]).arg(&file).arg(line)).ok();
        let words = outcome.stdout.lines().map(str::to_owned);
        words.collect::<Vec<_>>()
    };
    assert_eq!(complete("firn mount /a /b -o clo"), ["close="]);
    assert_eq!(complete("firn mount /a /b -o close=h"), ["held"]);
    let after_comma = complete("firn mount /a /b -o close=held,drain=d");
    assert_eq!(after_comma, ["demand"]);
    assert_eq!(
        complete("firn mount /a /b -o close=held,nosu"),
        ["held,nosuid"]
    );
    let point = mount.path().display().to_string();
    for verb in ["umount", "status", "wait"] {
        let typed = &point[..point.len() - 2];
        assert!(
            complete(&format!("firn {verb} {typed}")).contains(&point),
            "{verb}"
        );
    }
    // All else is as before.
    assert_eq!(complete("firn umou"), ["umount"]);
    assert!(complete("firn wait --un").contains(&"--until".to_owned()));
}

/// The processes that keep a mount are named with what they have open.
#[test]
fn a_busy_unmount_names_the_program_and_its_file() {
    let sandbox = Sandbox::new("busy");
    let mount = FirnMount::new(&sandbox, SMALL);
    fs::create_dir(mount.join("step_3")).expect("mkdir");
    let mut reader = Command::new("sh")
        .args(["-c", "exec 3>\"$1\"/step_3/rank_0; echo; read end", "sh"])
        .arg(mount.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sh");
    let mut ready = [0];
    std::io::Read::read_exact(reader.stdout.as_mut().expect("piped"), &mut ready)
        .expect("it has the file open");
    let refused = sandbox.run(["umount".as_ref(), mount.path().as_os_str()]);
    drop(reader.stdin.take());
    reader.wait().expect("it ends");
    refused.code(11).says(&format!(
        "sh (process {}) has step_3/rank_0 open",
        reader.id()
    ));
    mount.umount();
}

#[test]
fn a_pipe_from_firn_mount_ends_when_the_command_does() {
    let sandbox = Sandbox::new("pipe");
    let mut command = sandbox.firn(["mount"]);
    command
        .arg(sandbox.join("backing"))
        .arg(sandbox.join("mnt"))
        .args(["-o", SMALL]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("firn mount");
    let mut pipe = child.stdout.take().expect("piped");
    let reader = std::thread::spawn(move || std::io::Read::read_to_end(&mut pipe, &mut Vec::new()));
    assert!(wait_child(&mut child, Duration::from_secs(30)).is_some_and(|status| status.success()));
    let closed = || reader.is_finished();
    firn_tests::wait_until(
        "firnd let go of its standard output",
        Duration::from_secs(5),
        closed,
    );
    sandbox
        .run(["umount".as_ref(), sandbox.join("mnt").as_os_str()])
        .ok();
}

/// Proves S-priv-1.
#[test]
fn runtime_files_belong_to_their_owner_alone() {
    use std::os::unix::fs::MetadataExt;
    let sandbox = Sandbox::new("privacy");
    let mount = FirnMount::new(&sandbox, SMALL);
    let files: Vec<PathBuf> = fs::read_dir(sandbox.runtime())
        .expect("readdir")
        .map(|e| e.expect("entry").path())
        .collect();
    let ends = |extension: &str| {
        files
            .iter()
            .any(|file| file.extension().is_some_and(|e| e == extension))
    };
    assert!(ends("arena") && ends("sock"), "{files:?}");
    for file in &files {
        let found = fs::metadata(file).expect("stat");
        assert_eq!(
            found.mode() & 0o7777,
            0o600,
            "{file:?} has mode {:o}",
            found.mode()
        );
        assert_eq!(found.uid(), rustix::process::geteuid().as_raw(), "{file:?}");
    }
    assert_eq!(
        fs::metadata(sandbox.runtime()).expect("stat").mode() & 0o7777,
        0o700
    );
    mount.umount();
}

#[test]
fn wait_gives_up_after_its_timeout() {
    let sandbox = Sandbox::new("timeout");
    let fault = firn_tests::faultfs::FaultFs::new(&sandbox);
    let mount = FirnMount::over(&sandbox, fault.path(), &format!("{SMALL},close=held"));
    fault.fail_writes("EIO");
    fs::write(mount.join("file"), "text").expect("held");
    let path = mount.path().as_os_str();
    let args = [
        "wait".as_ref(),
        "--timeout".as_ref(),
        "1".as_ref(),
        "--until".as_ref(),
        "drained".as_ref(),
        path,
    ];
    let outcome = sandbox.run(args);
    assert!([1, 3].contains(&outcome.code), "{outcome}");
    fault.fail_writes("");
    mount.wait("drained", mount.path()).ok();
    mount.umount();
}
