//! Mistakes that are told where they are made: at the mount, in a variable, by a close that waits.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use firn_tests::command::copy_program;
use firn_tests::faultfs::FaultFs;
use firn_tests::mount::{SMALL, mount_args, patient, status_of};
use firn_tests::sandbox::{firn_binary, is_mounted, kill};
use firn_tests::{FirnMount, FsKind, LoopImage, Outcome, Sandbox, run};

/// The user `nobody`: fusermount3 mounts for users that have a name.
const USER: u32 = 65534;

/// mount.firn as mount(8) calls it.
fn mount_helper(sandbox: &Sandbox, backing: &Path, point: &Path, options: &str) -> Outcome {
    let mut helper = Command::new(firn_binary());
    sandbox.environment(&mut helper);
    helper.arg0("/sbin/mount.firn").arg(backing).arg(point);
    run(helper.args(["-o", options]))
}

#[test]
fn a_mount_point_with_files_is_refused_and_swapped_arguments_are_named() {
    let sandbox = Sandbox::new("swapped");
    let full = sandbox.mkdir("run42");
    let empty = sandbox.join("mnt");
    fs::write(full.join("model.pt"), "weights").expect("write");
    let refused = sandbox.run(mount_args(&empty, &full, SMALL)).code(2);
    let right = format!("`firn mount {} {}`", full.display(), empty.display());
    refused.says("is not empty").says(&right);
    assert!(!is_mounted(&full));
    assert_eq!(mount_helper(&sandbox, &empty, &full, SMALL).code, 1);
    assert!(sandbox.arenas().is_empty(), "{:?}", sandbox.arenas());
    // No swap is seen where both have files, and none is told.
    let other = sandbox.mkdir("other");
    fs::write(other.join("file"), "x").expect("write");
    let refused = sandbox.run(mount_args(&other, &full, SMALL)).code(2);
    assert!(!refused.stderr.contains("was `firn mount"), "{refused}");
    // A user that wants it gets it, and the files come back.
    let options = format!("{SMALL},nonempty");
    let mount = FirnMount::at(&sandbox, &empty, &full, &options);
    assert!(!full.join("model.pt").exists());
    mount.umount();
    assert_eq!(fs::read(full.join("model.pt")).expect("read"), b"weights");
    mount_helper(&sandbox, &empty, &full, &options).ok();
    sandbox.run(["umount".as_ref(), full.as_os_str()]).ok();
}

#[test]
fn a_dead_mount_over_an_empty_directory_is_mounted_again() {
    let sandbox = Sandbox::new("again");
    let mount = FirnMount::new(&sandbox, SMALL);
    fs::write(mount.join("file"), "text").expect("write");
    kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    mount.abandon();
    let mount = FirnMount::new(&sandbox, SMALL);
    assert_eq!(fs::read(mount.join("file")).expect("read"), b"text");
    mount.umount();
}

#[test]
fn a_user_hears_at_the_mount_that_the_backing_is_not_theirs_to_write() {
    let sandbox = Sandbox::new("unwritable");
    let program = sandbox.join("firn");
    copy_program(&firn_binary(), &program);
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("chmod");
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    let runtime = tempfile::Builder::new()
        .prefix("firn-test-unwritable-user-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in("/dev/shm")
        .expect("a runtime directory");
    for path in [&point, runtime.path()] {
        std::os::unix::fs::chown(path, Some(USER), Some(USER)).expect("chown");
    }
    let as_user = |args: &[&std::ffi::OsStr]| {
        let mut command = Command::new(&program);
        sandbox.environment(&mut command);
        command.env("FIRN_RUNTIME_DIR", runtime.path());
        run(command.uid(USER).gid(USER).args(args))
    };
    let mount = |options: &str| {
        let args = mount_args(&backing, &point, options);
        let args: Vec<_> = args.iter().map(|arg| arg.as_os_str()).collect();
        as_user(&args).ok()
    };
    let umount = || as_user(&["umount".as_ref(), point.as_os_str()]).ok();
    mount(SMALL)
        .says(&format!("user {USER} may not write to backing directory"))
        .says("mode 0755");
    umount();
    // Nothing to tell where nothing is to be written, or it may be.
    let told = mount(&format!("{SMALL},ro"));
    assert!(!told.stderr.contains("may not write"), "{told}");
    umount();
    std::os::unix::fs::chown(&backing, Some(USER), Some(USER)).expect("chown");
    let told = mount(SMALL);
    assert_eq!(told.stderr, "", "{told}");
    umount();
}

#[test]
fn a_misspelt_variable_is_told_with_the_right_name() {
    let sandbox = Sandbox::new("misspelt");
    let mut command = sandbox.firn(["config"]);
    command.env("FIRN_ARENASIZE", "1G").env("FIRN_ROOT", "/opt");
    let outcome = run(&mut command).ok();
    let expected =
        "firn: the variable FIRN_ARENASIZE has no effect: did you mean FIRN_ARENA_SIZE?\n";
    assert_eq!(outcome.stderr, expected);
    let silent = sandbox.run(["config"]).ok();
    assert_eq!(silent.stderr, "");
    // A mount goes on; its log has the line, too.
    let args = mount_args(&sandbox.join("backing"), &sandbox.join("mnt"), SMALL);
    let mut command = sandbox.firn(args);
    run(command.env("FIRN_COLSE", "held"))
        .ok()
        .says("did you mean FIRN_CLOSE?");
    let logs = sandbox.logs();
    assert!(logs.contains("did you mean FIRN_CLOSE?"), "{logs}");
    sandbox
        .run(["umount".as_ref(), sandbox.join("mnt").as_os_str()])
        .ok();
}

#[test]
fn closes_that_wait_long_for_the_backing_give_one_hint() {
    const CLOSES: usize = 40;
    // So that all of them together wait for 10 s and more.
    const EACH: Duration = Duration::from_millis(400);
    let sandbox = Sandbox::new("slow-close");
    let faulty = FaultFs::new(&sandbox);
    let mount = FirnMount::over(&sandbox, faulty.path(), &patient("close=drain"));
    let mut files: Vec<File> = (0..CLOSES)
        .map(|index| File::create(mount.join(format!("file{index}"))).expect("create"))
        .collect();
    faulty.stall();
    // Behind the stall, so that nothing drains before its close.
    for file in &mut files {
        file.write_all(b"text").expect("write");
    }
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for file in files {
            scope.spawn(move || drop(file));
        }
        // The time is what is measured, not what is waited for.
        // A loaded machine hands some closes to firnd late.
        while begin.elapsed() < 8 * EACH {
            std::thread::sleep(Duration::from_millis(10));
        }
        faulty.go_on();
    });
    let status = mount.status();
    assert!(
        status.close_wait_seconds >= 10.0,
        "{}",
        status.close_wait_seconds
    );
    let shown = sandbox
        .run(["status".as_ref(), mount.path().as_os_str()])
        .ok();
    assert!(shown.stdout.contains("-o close=held"), "{shown}");
    let hints = || sandbox.logs().matches("with -o close=held").count();
    firn_tests::wait_until("the log has the hint", Duration::from_secs(30), || {
        hints() > 0
    });
    // The next sample has come, without another hint.
    let uptime = mount.status().uptime_seconds;
    firn_tests::wait_until("two more samples", Duration::from_secs(30), || {
        mount.status().uptime_seconds > uptime + 2.5
    });
    assert_eq!(hints(), 1);
    mount.umount();
}

#[test]
fn an_arena_that_does_not_fit_is_refused_with_the_size_that_does() {
    let sandbox = Sandbox::new("fits");
    let arenas = LoopImage::new(&sandbox, FsKind::Tmpfs, 64);
    let backing = sandbox.join("backing");
    let point = sandbox.join("mnt");
    let options = |size: &str| format!("arena-size={size},arena-dir={}", arenas.path().display());
    let refused = sandbox
        .run(mount_args(&backing, &point, &options("256M")))
        .code(2);
    let refused = refused.says("needs 258.8 MiB").says("has 64.0 MiB free");
    let advice = refused.stderr.split("mount with -o arena-size=").nth(1);
    let size = advice
        .and_then(|rest| rest.split(',').next())
        .expect("a size");
    let mount = FirnMount::at(&sandbox, &backing, &point, &options(size));
    assert!(mount.status().arena_bytes > 32 << 20);
    mount.umount();
}

#[test]
fn metrics_are_written_to_a_file_as_a_whole() {
    let sandbox = Sandbox::new("metrics");
    let mount = FirnMount::new(&sandbox, SMALL);
    let dir = sandbox.mkdir("collector");
    let file = dir.join("firn.prom");
    fs::write(&file, "old").expect("write");
    let before = fs::metadata(&file).expect("stat").ino();
    let write = |file: &Path| {
        sandbox.run([
            "status".as_ref(),
            "--prometheus".as_ref(),
            "--output".as_ref(),
            file.as_os_str(),
            mount.path().as_os_str(),
        ])
    };
    let outcome = write(&file).ok();
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("", ""));
    let text = fs::read_to_string(&file).expect("read");
    assert!(
        text.contains("firn_close_wait_seconds_total") && text.ends_with('\n'),
        "{text}"
    );
    let after = fs::metadata(&file).expect("stat");
    assert!(after.ino() != before && after.mode() & 0o777 == 0o644);
    assert_eq!(fs::read_dir(&dir).expect("list").count(), 1);
    write(&sandbox.join("missing/firn.prom"))
        .code(1)
        .says("cannot write");
    mount.umount();
}

#[test]
fn mounts_that_do_not_answer_are_one_line_for_a_collector() {
    let sandbox = Sandbox::new("silent");
    let dead: Vec<_> = (0..3)
        .map(|index| {
            let [backing, point] = ["b", "m"].map(|name| sandbox.mkdir(&format!("{name}{index}")));
            FirnMount::at(&sandbox, &backing, &point, SMALL)
        })
        .collect();
    let living = FirnMount::new(&sandbox, SMALL);
    for mount in &dead {
        kill(mount.pid(), libc::SIGKILL);
        mount.wait_for_end();
    }
    let outcome = sandbox.run(["status", "--prometheus"]).code(3);
    // Mounts of tests beside this one have runtime directories of their own, and a line for all of them.
    let is_of_this_user = |line: &&str| !line.contains("another FIRN_RUNTIME_DIR");
    let lines: Vec<_> = outcome.stderr.lines().filter(is_of_this_user).collect();
    assert!(
        lines.len() == 1 && lines[0].contains("mounts do not answer"),
        "{outcome}"
    );
    for mount in &dead {
        assert!(
            lines[0].contains(&*mount.path().to_string_lossy()),
            "{outcome}"
        );
    }
    assert!(outcome.stdout.contains("firn_held_bytes"), "{outcome}");
    assert_eq!(status_of(&sandbox, living.path()).held_bytes, 0);
    living.umount();
}
