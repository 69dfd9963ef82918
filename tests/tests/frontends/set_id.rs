//! What a file loses when it is changed: set-id bits and capabilities, call by call beside ext4.
//!
//! Everything here runs with `attr-timeout=1h`: what the kernel keeps and is not told to drop stays wrong for the whole
//! test. The users are numbers without an account.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use firn_tests::change::{CALLS, CAP_DAC_OVERRIDE, CAPABILITY, Caller, SOURCE, change, left};
use firn_tests::command::copy_program;
use firn_tests::preloaded::DIRECT_AFTER;
use firn_tests::sandbox::preload_library;
use firn_tests::transaction::firn;
use firn_tests::{FirnMount, FsKind, LoopImage, Sandbox, helper_binary, run};
use rustix::fs::XattrFlags;

const OPTIONS: &str = "arena-size=32M,chunk-size=1M,suid,allow-other,attr-timeout=1h";

const OWNER: u32 = 2_000_001;
const OTHER: u32 = 2_000_002;
/// The files' group.
const GROUP: u32 = 2_000_003;
const NO_GROUP: u32 = 2_000_004;

const fn who(name: &'static str, uid: u32, gid: u32, group: u32) -> Caller {
    Caller {
        name,
        uid,
        gid,
        group,
        may_set_id: true,
    }
}

const CALLERS: [Caller; 7] = [
    who("owner", OWNER, NO_GROUP, NO_GROUP),
    who("owner in the group", OWNER, NO_GROUP, GROUP),
    who("other", OTHER, NO_GROUP, NO_GROUP),
    who("other in the group", OTHER, NO_GROUP, GROUP),
    who("other of the group", OTHER, GROUP, NO_GROUP),
    who("root", 0, 0, NO_GROUP),
    Caller {
        may_set_id: false,
        ..who("root without CAP_FSETID", 0, 0, NO_GROUP)
    },
];

/// Mode, and whether the file has a capability. All can be written by every user.
const KINDS: [(u32, bool); 8] = [
    (0o4777, false),
    (0o2777, false),
    (0o2767, false),
    (0o6777, false),
    (0o6767, false),
    (0o777, true),
    (0o6777, true),
    (0o777, false),
];

/// A call by a user, of a file of some kind.
#[derive(Clone, Copy)]
struct Case {
    who: &'static Caller,
    call: &'static str,
    mode: u32,
    capable: bool,
}

impl Case {
    fn all() -> impl Iterator<Item = Self> {
        let calls = CALLERS
            .iter()
            .flat_map(|who| CALLS.iter().map(move |call| (who, *call)));
        calls.flat_map(|(who, call)| {
            KINDS.map(|(mode, capable)| Self {
                who,
                call,
                mode,
                capable,
            })
        })
    }

    fn name(&self) -> String {
        let capable = if self.capable { "+capable" } else { "" };
        format!("{} {} {:04o}{capable}", self.who.name, self.call, self.mode)
    }

    /// Makes the file, and lets the kernel see what it is.
    fn prepare(&self, dir: &Path) {
        let path = dir.join(self.name());
        fs::write(&path, [7; 8192]).expect("write");
        chown(&path, Some(OWNER), Some(GROUP)).expect("chown");
        fs::set_permissions(&path, Permissions::from_mode(self.mode)).expect("chmod");
        if self.capable {
            rustix::fs::setxattr(&path, CAPABILITY, &CAP_DAC_OVERRIDE, XattrFlags::empty())
                .expect("setcap");
        }
        assert_eq!(left(&path), self.untouched());
    }

    fn untouched(&self) -> String {
        format!(
            "{:04o} {}",
            self.mode,
            if self.capable { "capable" } else { "plain" }
        )
    }

    fn run(&self, helper: &Path, dir: &Path, preload: impl FnOnce(&mut Command)) -> String {
        let path = dir.join(self.name());
        let answer = change(helper, self.who, self.call, &path, preload);
        let after = left(&path);
        assert!(
            answer.ends_with(&after),
            "{}: {answer}, and after its end {after}",
            self.name()
        );
        answer
    }
}

/// A plain directory and a backing on one ext4.
struct Place {
    sandbox: Sandbox,
    image: LoopImage,
    helper: PathBuf,
}

impl Place {
    fn new(name: &str) -> Self {
        let sandbox = Sandbox::new(name);
        fs::set_permissions(sandbox.path(), Permissions::from_mode(0o755)).expect("chmod");
        let image = LoopImage::new(&sandbox, FsKind::Ext4, 256);
        // Other users may not get at the one that was built.
        let helper = sandbox.join("helper");
        copy_program(&helper_binary(), &helper);
        Self {
            sandbox,
            image,
            helper,
        }
    }

    /// A directory in which everything is prepared for `cases`.
    fn prepare(dir: &Path, cases: &[Case]) {
        fs::write(dir.join(SOURCE), [9; 8192]).expect("write");
        cases.iter().for_each(|case| case.prepare(dir));
    }
}

/// What a call leaves on ext4 and not through Firn: never a right more.
fn is_stricter(case: &Case, expected: &str, found: &str) -> bool {
    match case.call {
        // The drain of what was stored is a write for the backing.
        "mmap" => expected.replace("capable", "plain") == found,
        // A user that is not the owner gets EPERM for a chown(2) that takes a bit away without changing anything. The
        // kernel asks for that as for the other calls that take it away.
        "chown-none" => expected == "errno 1 2767 plain" && found == "errno 0 0767 plain",
        _ => false,
    }
}

/// Carries out `cases` on both sides; panics with all that differ. Returns what they left.
fn compare(
    place: &Place,
    cases: &[Case],
    mount: &Path,
    run: impl Fn(&Case, &Path) -> String,
) -> Vec<String> {
    let plain = place.image.mkdir("plain");
    Place::prepare(&plain, cases);
    let mut wrong = Vec::new();
    let mut all = Vec::new();
    for case in cases {
        let expected = case.run(&place.helper, &plain, |_| {});
        let found = run(case, mount);
        if found != expected && !is_stricter(case, &expected, &found) {
            wrong.push(format!("{}: ext4 {expected}, Firn {found}", case.name()));
        }
        all.push(
            found
                .rsplit_once("errno ")
                .and_then(|(_, rest)| rest.split_once(' '))
                .expect("an answer")
                .1
                .to_owned(),
        );
    }
    assert!(
        wrong.is_empty(),
        "{} of {} differ:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
    all
}

/// Proves S-write-9, S-write-10, S-write-11.
#[test]
fn every_call_leaves_what_ext4_leaves() {
    let place = Place::new("set-id");
    let options = format!("{OPTIONS},passthrough=off");
    let mount = FirnMount::over(&place.sandbox, &place.image.mkdir("backing"), &options);
    let cases: Vec<_> = Case::all().collect();
    Place::prepare(mount.path(), &cases);
    compare(&place, &cases, mount.path(), |case, dir| {
        case.run(&place.helper, dir, |_| {})
    });
}

/// The same where the kernel writes to the backing by itself. Proves S-write-9.
#[test]
fn the_kernel_s_own_writes_leave_what_ext4_leaves() {
    let place = Place::new("set-id-pass");
    let mount = FirnMount::over(&place.sandbox, &place.image.mkdir("backing"), OPTIONS);
    let cases: Vec<_> = Case::all().collect();
    Place::prepare(mount.path(), &cases);
    let ingested = mount.status().ingest_bytes;
    compare(&place, &cases, mount.path(), |case, dir| {
        let _passes_through = File::open(dir.join(case.name())).expect("open");
        case.run(&place.helper, dir, |_| {})
    });
    assert_eq!(
        mount.status().ingest_bytes,
        ingested,
        "no write came to firnd"
    );
}

/// In a transaction, which brings everything back where it is aborted.
fn transactions_leave_what_ext4_leaves(mode: &str) {
    let place = Place::new("set-id-tx");
    let backing = place.image.mkdir("backing");
    let mount = FirnMount::over(
        &place.sandbox,
        &backing,
        &format!("{OPTIONS},drain=commit,mode={mode}"),
    );
    let cases: Vec<_> = Case::all().collect();
    Place::prepare(mount.path(), &cases);
    let run = |case: &Case, dir: &Path| case.run(&place.helper, dir, |_| {});
    firn(&place.sandbox, "begin", mount.path()).ok();
    compare(&place, &cases, mount.path(), run);
    firn(&place.sandbox, "abort", mount.path()).ok();
    for case in &cases {
        let found = [mount.path(), &backing].map(|dir| left(&dir.join(case.name())));
        assert_eq!(
            found,
            [case.untouched(), case.untouched()],
            "{} after the abort",
            case.name()
        );
    }
    firn(&place.sandbox, "begin", mount.path()).ok();
    let expected = compare(&place, &cases, mount.path(), run);
    firn(&place.sandbox, "commit", mount.path()).ok();
    for (case, expected) in cases.iter().zip(expected) {
        let found = [mount.path(), &backing].map(|dir| left(&dir.join(case.name())));
        // What was stored to a mapping is written to the backing by the commit.
        let expected = if case.call == "mmap" {
            expected.replace("capable", "plain")
        } else {
            expected
        };
        assert_eq!(
            found,
            [expected.clone(), expected],
            "{} after the commit",
            case.name()
        );
    }
}

/// Proves S-write-9, S-write-10 and S-tx-3.
#[test]
fn a_transaction_that_is_held_leaves_what_ext4_leaves() {
    transactions_leave_what_ext4_leaves("buffer");
}

/// Proves S-write-9, S-write-10 and S-tx-21.
#[test]
fn a_transaction_with_a_shadow_leaves_what_ext4_leaves() {
    transactions_leave_what_ext4_leaves("shadow");
}

/// The preload library writes by direct access only where no bit can be lost. Proves S-write-9.
#[test]
fn the_preload_library_leaves_what_ext4_leaves() {
    let place = Place::new("set-id-preload");
    let mount = FirnMount::over(&place.sandbox, &place.image.mkdir("backing"), OPTIONS);
    let cases: Vec<_> = Case::all().filter(|case| case.who.uid == 0).collect();
    Place::prepare(mount.path(), &cases);
    compare(&place, &cases, mount.path(), |case, dir| {
        case.run(&place.helper, dir, |command| {
            place.sandbox.environment(command);
            command.env("LD_PRELOAD", preload_library());
            command.env(DIRECT_AFTER, "0");
        })
    });
}

/// A program that runs with rights of its own, in the mount and not the writer's.
fn program(mount: &FirnMount, from: &str, mode: u32, capable: bool) -> PathBuf {
    let path = mount.join("program");
    fs::copy(from, &path).expect("copy");
    chown(&path, Some(OWNER), Some(GROUP)).expect("chown");
    fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
    if capable {
        rustix::fs::setxattr(&path, CAPABILITY, &CAP_DAC_OVERRIDE, XattrFlags::empty())
            .expect("setcap");
    }
    path
}

/// Runs it as a user with no rights.
fn run_by_other(program: &Path, arg: &str) -> String {
    let mut command = Command::new(program);
    run(command.arg(arg).uid(OTHER).gid(NO_GROUP).env_clear())
        .ok()
        .stdout
}

/// A part of the program, with which nothing changes but that it was written: `dd conv=notrunc` by the other user.
fn overwrite_by_other(program: &Path, from: &str) {
    let input = format!("if={from}");
    let output = format!("of={}", program.display());
    let mut dd = Command::new("dd");
    run(dd
        .args([input, output, "conv=notrunc".to_owned()])
        .uid(OTHER)
        .gid(NO_GROUP))
    .ok();
}

/// Proves S-write-9, S-write-11.
#[test]
fn regression_code_that_another_user_wrote_never_runs_with_the_rights_of_the_file() {
    for options in [
        "passthrough=off",
        "passthrough=auto",
        "close=held,passthrough=off",
        "drain=demand",
    ] {
        let place = Place::new("set-id-exec");
        let options = format!("{OPTIONS},{options}");
        let mount = FirnMount::over(&place.sandbox, &place.image.mkdir("backing"), &options);
        let id = program(&mount, "/usr/bin/id", 0o4777, false);
        assert_eq!(
            run_by_other(&id, "-u").trim(),
            OWNER.to_string(),
            "set-user-id works here"
        );
        overwrite_by_other(&id, "/usr/bin/id");
        assert_eq!(
            run_by_other(&id, "-u").trim(),
            OTHER.to_string(),
            "{options}"
        );
        let cat = program(&mount, "/usr/bin/cat", 0o777, true);
        let effective = |status: String| {
            status
                .lines()
                .find(|line| line.starts_with("CapEff"))
                .map(str::to_owned)
        };
        let before = effective(run_by_other(&cat, "/proc/self/status")).expect("CapEff");
        assert!(
            before.ends_with("0002"),
            "the capability works here: {before}"
        );
        overwrite_by_other(&cat, "/usr/bin/cat");
        let after = effective(run_by_other(&cat, "/proc/self/status")).expect("CapEff");
        assert!(after.ends_with("0000"), "{options}: {after}");
    }
}
