//! `firn doctor`: what it finds, what it leaves alone, and that nothing holds it up.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use firn_tests::command::copy_program;
use firn_tests::faultfs::FaultFs;
use firn_tests::mount::patient;
use firn_tests::sandbox::{firn_binary, kill};
use firn_tests::{FirnMount, Outcome, Sandbox, run};
use serde_json::Value;

/// A user that has nothing here.
const USER: u32 = 4_000_017;

fn examine(sandbox: &Sandbox, args: &[&str], backing: Option<&Path>) -> Outcome {
    let mut all: Vec<OsString> = vec!["doctor".into(), "--json".into()];
    all.extend(args.iter().map(OsString::from));
    all.extend(backing.map(OsString::from));
    sandbox.run(all)
}

/// The findings of one check: verdict, text, advice.
fn found(outcome: &Outcome, check: &str) -> Vec<[String; 3]> {
    let json = outcome.json();
    let findings = json["findings"].as_array().expect("an array");
    let of_check = findings.iter().filter(|found| found["check"] == check);
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    of_check
        .map(|found| ["verdict", "text", "advice"].map(|key| word(&found[key])))
        .collect()
}

/// What is wrong by one check. Root sees mounts of other tests, too: `about` is in the text of what is meant.
#[track_caller]
fn wrong(outcome: &Outcome, check: &str, about: &str) -> [String; 3] {
    let findings = found(outcome, check);
    let mut wrong = findings
        .iter()
        .filter(|[verdict, text, _]| verdict == "wrong" && text.contains(about));
    let Some(wrong) = wrong.next() else {
        panic!("{check} finds nothing wrong about {about:?}: {outcome}")
    };
    assert_eq!(outcome.code, 1, "{outcome}");
    wrong.clone()
}

#[test]
fn a_good_backing_is_found_good_and_nothing_is_left_in_it() {
    let sandbox = Sandbox::new("doctor");
    let backing = sandbox.join("backing");
    fs::write(backing.join("file"), "text").expect("write");
    let outcome = examine(&sandbox, &["--arena-size=16M"], Some(&backing));
    let json = outcome.json();
    let findings = json["findings"].as_array().expect("an array").clone();
    for check in [
        "fuse", "memory", "arenas", "backing", "sync", "names", "clock",
    ] {
        let verdicts = found(&outcome, check);
        assert!(!verdicts.is_empty(), "{check} is missing: {outcome}");
        // The place of the temporary directory may be a container's.
        let is_good = |[verdict, ..]: &[String; 3]| {
            verdict == "ok" || check == "backing" && verdict == "note"
        };
        assert!(verdicts.iter().all(is_good), "{check}: {outcome}");
    }
    let count = |verdict: &str| {
        findings
            .iter()
            .filter(|found| found["verdict"] == verdict)
            .count()
    };
    let expected = match (count("wrong"), count("note")) {
        (0, 0) => 0,
        (0, _) => 3,
        _ => 1,
    };
    assert_eq!(outcome.code, expected, "{outcome}");
    // Each note says what to do.
    for finding in &findings {
        let has_advice = finding["advice"]
            .as_str()
            .is_some_and(|advice| !advice.is_empty());
        assert!(finding["verdict"] != "note" || has_advice, "{finding}");
    }
    let names: Vec<_> = fs::read_dir(&backing).expect("list").flatten().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    assert_eq!(fs::read(backing.join("file")).expect("read"), b"text");

    // For people: a line each and the sums, without colours where there is no terminal.
    let text = sandbox.run(["doctor".as_ref(), backing.as_os_str()]).stdout;
    assert!(
        text.contains("ok     fuse") && !text.contains('\x1b'),
        "{text}"
    );
    assert!(text.trim_end().ends_with(" ok"), "{text}");
}

#[test]
fn a_dead_mount_and_its_arena_are_found_with_the_commands_that_recover_them() {
    let sandbox = Sandbox::new("doctor-dead");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    fs::write(mount.join("file"), vec![7; 1 << 20]).expect("write");
    let living = examine(&sandbox, &[], None);
    let point = mount.path().to_str().expect("UTF-8");
    let is_told = |[_, text, _]: &[String; 3]| text.contains(point);
    assert!(!found(&living, "mounts").iter().any(is_told), "{living}");
    assert_eq!(found(&living, "arenas")[0][0], "ok", "{living}");
    kill(mount.pid(), libc::SIGKILL);
    mount.wait_for_end();
    let outcome = examine(&sandbox, &[], None);
    let backing = mount.backing().canonicalize().expect("canonical");
    let [_, text, advice] = wrong(&outcome, "mounts", point);
    assert!(text.contains("is dead"), "{outcome}");
    let command = format!(
        "`firn mount {} {}`",
        backing.display(),
        mount.path().display()
    );
    assert!(advice.contains(&command), "{advice}");
    let [_, text, advice] = wrong(&outcome, "arenas", "");
    assert!(text.contains("1.0 MiB"), "{text}");
    assert!(
        advice.contains(&format!("`firn recover {}`", backing.display())),
        "{advice}"
    );
    // A dead mount is no backing.
    let outcome = examine(&sandbox, &["--timeout=5s"], Some(mount.path()));
    wrong(&outcome, "backing", "");
    drop(mount);
    sandbox.run(["recover".as_ref(), backing.as_os_str()]).ok();
    let healed = examine(&sandbox, &[], None);
    assert_eq!(found(&healed, "arenas")[0][0], "ok", "{healed}");
}

#[test]
fn a_backing_that_does_not_answer_does_not_hold_the_doctor() {
    let sandbox = Sandbox::new("doctor-hangs");
    let faulty = FaultFs::new(&sandbox);
    faulty.stall();
    let begin = Instant::now();
    let outcome = examine(&sandbox, &["--timeout=2s"], Some(faulty.path()));
    let took = begin.elapsed();
    faulty.go_on();
    let [_, text, _] = wrong(&outcome, "backing", "");
    assert!(text.contains("did not answer within 2 s"), "{outcome}");
    assert!(found(&outcome, "fuse")[0][0] == "ok", "{outcome}");
    assert_eq!(found(&outcome, "storage")[0][0], "note", "{outcome}");
    // Once for all checks of the backing, and not for each.
    assert!(took < Duration::from_secs(60), "{took:?}");
    let outcome = examine(&sandbox, &[], Some(faulty.path()));
    assert_eq!(found(&outcome, "sync")[0][0], "ok", "{outcome}");
    let names: Vec<_> = fs::read_dir(faulty.source()).expect("list").collect();
    assert!(names.is_empty(), "{names:?}");
}

#[test]
fn a_mount_is_named_as_no_backing() {
    let sandbox = Sandbox::new("doctor-mount");
    let mount = FirnMount::new(&sandbox, &patient("close=held"));
    let outcome = examine(&sandbox, &[], Some(mount.path()));
    let [_, text, advice] = wrong(&outcome, "backing", "");
    assert!(text.contains("on a Firn mount"), "{text}");
    assert!(advice.contains("firn doctor"), "{advice}");
    assert_eq!(fs::read_dir(mount.backing()).expect("list").count(), 0);
    mount.umount();
}

#[test]
fn what_a_mount_would_be_refused_for_is_wrong() {
    let sandbox = Sandbox::new("doctor-options");
    let outcome = examine(&sandbox, &["--arena-size=900G"], None);
    let [_, text, advice] = wrong(&outcome, "memory", "");
    assert!(text.contains("needs") && text.contains("GiB"), "{text}");
    assert!(advice.contains("arena-size="), "{advice}");
    let missing = sandbox.join("missing");
    let outcome = examine(&sandbox, &[], Some(&missing));
    let [_, text, _] = wrong(&outcome, "backing", "");
    assert!(text.contains("does not exist"), "{text}");
    let mut command = sandbox.firn(["doctor", "--json"]);
    command
        .env("FIRN_ARENASIZE", "1G")
        .env("FIRN_CLOSE", "never");
    let outcome = run(&mut command);
    let settings = found(&outcome, "settings");
    assert!(
        settings
            .iter()
            .any(|[verdict, text, _]| verdict == "wrong" && text.contains("close")),
        "{outcome}"
    );
    let advice = |[verdict, _, advice]: &[String; 3]| {
        verdict == "note" && advice.contains("FIRN_ARENA_SIZE")
    };
    assert!(settings.iter().any(advice), "{outcome}");
}

#[test]
fn a_user_is_told_what_they_may_not_do() {
    let sandbox = Sandbox::new("doctor-user");
    let program = sandbox.join("firn");
    copy_program(&firn_binary(), &program);
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("chmod");
    let backing = sandbox.join("backing");
    let empty = sandbox.mkdir("empty");
    let examine = |path: Option<&Path>| {
        let mut command = Command::new(&program);
        sandbox.environment(&mut command);
        command.env_remove("FIRN_RUNTIME_DIR").uid(USER).gid(USER);
        if let Some(path) = path {
            command.env("PATH", path);
        }
        run(command.args(["doctor", "--json"]).arg(&backing))
    };
    let outcome = examine(Some(&empty));
    let [_, text, advice] = wrong(&outcome, "fusermount3", "");
    assert!(text.contains("is not in the PATH"), "{text}");
    assert!(
        advice.contains("fuse3") && advice.contains("firn run"),
        "{advice}"
    );
    let [_, text, _] = wrong(&outcome, "writable", "");
    assert!(
        text.contains(&format!("user {USER} may not write")) && text.contains("mode 0755"),
        "{text}"
    );
    // Firn's own directory, of another user.
    let own = backing.join(".firn");
    fs::create_dir(&own).expect("mkdir");
    let outcome = examine(None);
    let noted =
        |[verdict, text, _]: &[String; 3]| verdict == "note" && text.contains("belongs to user 0");
    assert!(found(&outcome, "backing").iter().any(noted), "{outcome}");
    assert_eq!(found(&outcome, "fusermount3")[0][0], "ok", "{outcome}");
    fs::remove_dir(&own).expect("rmdir");
    assert_eq!(fs::read_dir(&backing).expect("list").count(), 0);
}

/// A killed check leaves its directory; the next doctor takes it away, and nothing of others.
#[test]
fn what_a_killed_check_left_is_removed_and_nothing_else() {
    let sandbox = Sandbox::new("doctor-left");
    let backing = sandbox.join("backing");
    let old = |name: &str, mode: u32| {
        let path = backing.join(name);
        fs::create_dir(&path).expect("mkdir");
        fs::write(path.join(".firn-doctor-synced"), "text").expect("write");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
        run(Command::new("touch").args(["-d", "2 days ago"]).arg(&path)).ok();
        path
    };
    let left = old(".firn-doctor-0123456789abcdef", 0o700);
    let shared = old(".firn-doctor-fedcba9876543210", 0o755);
    // A directory of the user's own, to which another user gave such a name.
    let renamed = old(".firn-doctor-bbbbbbbbbbbbbbbb", 0o700);
    fs::write(renamed.join("model.pt"), "weights").expect("write");
    run(Command::new("touch")
        .args(["-d", "2 days ago"])
        .arg(&renamed))
    .ok();
    let others = old(".firn-doctor-aaaaaaaaaaaaaaaa", 0o700);
    std::os::unix::fs::chown(&others, Some(USER), Some(USER)).expect("chown");
    examine(&sandbox, &[], Some(&backing));
    assert!(!left.exists());
    for kept in [&shared, &others] {
        assert!(kept.join(".firn-doctor-synced").exists(), "{kept:?}");
    }
    assert!(renamed.join("model.pt").exists());
    assert_eq!(fs::read_dir(&backing).expect("list").count(), 3);
}
