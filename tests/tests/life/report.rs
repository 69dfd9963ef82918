//! `firn report`, `firn run --report`, and what pages of theirs show in a browser of this machine.
//!
//! With FIRN_RECORD=1 the picture of the guide, docs/figures/report.png, is made anew.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_tests::command::{run_within, wait_until};
use firn_tests::{FirnMount, Sandbox, run};
use serde_json::Value;

/// A browser starts slowly on a loaded machine.
const BROWSER_LIMIT: Duration = Duration::from_secs(170);
const PICTURE: &str = "../docs/figures/report.png";
const PICTURE_BYTES_MAX: u64 = 200 << 10;

/// A browser of this machine.
struct Browser {
    program: &'static str,
    is_firefox: bool,
}

/// As `scripts/setup` knows them.
const BROWSERS: [Browser; 5] = [
    Browser::chromium("chromium"),
    Browser::chromium("chromium-browser"),
    Browser::chromium("google-chrome"),
    Browser::firefox("firefox-esr"),
    Browser::firefox("firefox"),
];

impl Browser {
    const fn chromium(program: &'static str) -> Self {
        Self {
            program,
            is_firefox: false,
        }
    }

    const fn firefox(program: &'static str) -> Self {
        Self {
            program,
            is_firefox: true,
        }
    }

    /// The first that starts: a package that only fetches a snap leaves a command that does not.
    fn find() -> &'static Self {
        let starts = |browser: &&Self| {
            let mut command = Command::new(browser.program);
            let output = command.arg("--version").output();
            output.is_ok_and(|output| output.status.success())
        };
        let found = BROWSERS.iter().find(starts);
        found.unwrap_or_else(|| {
            let names = BROWSERS.map(|browser| browser.program).join(", ");
            panic!("pages of reports are looked at in a browser, and none of {names} starts here: run scripts/setup")
        })
    }

    fn run(&self, sandbox: &Sandbox, page: &Path, args: &[String]) -> String {
        let profile = sandbox.join("browser");
        fs::create_dir_all(&profile).expect("a directory for the browser");
        let mut command = Command::new(self.program);
        command.arg("--headless");
        if self.is_firefox {
            command.arg("--profile").arg(&profile).env("HOME", &profile);
        } else {
            command
                .args(["--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
                .arg(format!("--user-data-dir={}", profile.display()));
        }
        command.args(args).arg(format!("file://{}", page.display()));
        let outcome = run_within(&mut command, BROWSER_LIMIT);
        assert!(outcome.code == 0, "{}: {outcome}", self.program);
        outcome.stdout
    }

    /// The page as scripts have changed it; none: this browser does not tell.
    fn dump(&self, sandbox: &Sandbox, page: &Path) -> Option<String> {
        let dump = || self.run(sandbox, page, &["--dump-dom".into()]);
        (!self.is_firefox).then(dump)
    }

    /// Takes a picture of the page.
    fn photograph(&self, sandbox: &Sandbox, page: &Path, size: [u32; 2], to: &Path) {
        let [width, height] = size;
        let args = if self.is_firefox {
            vec![
                "--screenshot".into(),
                to.display().to_string(),
                format!("--window-size={width},{height}"),
            ]
        } else {
            vec![
                format!("--window-size={width},{height}"),
                format!("--screenshot={}", to.display()),
            ]
        };
        self.run(sandbox, page, &args);
    }
}

/// Writes checkpoints as a job does: some files each, in small writes, and a sync of the last one.
fn write_steps(dir: &Path, steps: u64) {
    for step in 0..steps {
        let dir = dir.join(format!("step_{step}"));
        fs::create_dir(&dir).expect("mkdir");
        for rank in 0..3 {
            let mut file = fs::File::create(dir.join(format!("rank_{rank}"))).expect("create");
            for _ in 0..64 {
                file.write_all(&[step as u8; 4096]).expect("write");
            }
            file.sync_all().expect("fsync");
        }
    }
}

fn records(sandbox: &Sandbox, path: &Path) -> Vec<Value> {
    let args = ["report".as_ref(), "--json".as_ref(), path.as_os_str()];
    let told = sandbox.run(args).ok().json();
    told.as_array().expect("a list").clone()
}

fn report(sandbox: &Sandbox, path: &Path) -> (i32, String, String) {
    let args = ["report".as_ref(), path.as_os_str()];
    let outcome = sandbox.run(args);
    (outcome.code, outcome.stdout, outcome.stderr)
}

/// Proves S-seen-11.
#[test]
fn a_record_has_every_byte_and_the_way_of_each_checkpoint() {
    let sandbox = Sandbox::new("report-record");
    let mount = FirnMount::new(&sandbox, "arena-size=64M");
    write_steps(mount.path(), 3);
    let written = 3 * 3 * 64 * 4096;
    let of_mount = records(&sandbox, mount.path());
    assert_eq!(of_mount[0]["has_ended"], false);
    let backing = mount.umount();
    let of_backing = records(&sandbox, &backing);
    assert_eq!(of_backing[0]["has_ended"], true);
    for record in [&of_mount[0], &of_backing[0]] {
        let buckets = record["buckets"].as_array().expect("buckets");
        let sum = |column: usize| -> u64 {
            let counts = buckets
                .iter()
                .map(|bucket| bucket[column].as_u64().expect("a sum"));
            counts.sum()
        };
        assert_eq!(
            (sum(0), sum(1), sum(2)),
            (written, 576, written),
            "{record}"
        );
        assert_eq!(record["ingest_write_bytes"]["sum"], written as f64);
        let checkpoints = record["checkpoints"].as_array().expect("checkpoints");
        assert_eq!(checkpoints.len(), 3, "{record}");
        for (step, checkpoint) in checkpoints.iter().enumerate() {
            assert_eq!(checkpoint["path"], format!("step_{step}"));
            assert_eq!(
                (&checkpoint["step"], &checkpoint["files"]),
                (&step.into(), &3.into())
            );
            let time = |name: &str| {
                checkpoint[name]
                    .as_f64()
                    .unwrap_or_else(|| panic!("{name}: {checkpoint}"))
            };
            assert!(time("began_seconds") <= time("closed_seconds"));
            assert!(time("began_seconds") <= time("drained_seconds"));
            assert!(time("drained_seconds") <= time("durable_seconds"));
        }
    }
    let kinds: Vec<&Value> = of_backing[0]["events"]
        .as_array()
        .expect("events")
        .iter()
        .map(|one| &one["kind"])
        .collect();
    assert_eq!(kinds, ["mounted", "unmounted"]);
}

/// Proves S-seen-12.
#[test]
fn a_run_leaves_a_page_that_a_browser_shows() {
    let browser = Browser::find();
    let sandbox = Sandbox::new("report-run");
    let page = sandbox.join("run <&> 1.html");
    let backing = sandbox.join("backing");
    let script = r#"
        set -e
        for step in 1 2 3 4 5 6 7 8; do
            mkdir "$FIRN_PREFIX/step_$step"
            for rank in 0 1 2 3; do
                dd if=/dev/zero of="$FIRN_PREFIX/step_$step/rank_$rank" bs=32k count=300 status=none &
            done
            wait
        done
    "#;
    let mut firn = sandbox.firn(["run", "--memory", "512M", "--no-preload", "--backing"]);
    firn.arg(&backing).arg("--report").arg(&page);
    firn.args(["--", "sh", "-c", script]);
    run(&mut firn).ok().says("the report is in");
    let html = fs::read_to_string(&page).expect("the page");
    let shown = browser.dump(&sandbox, &page);
    let parts = [
        "Written by programs",
        "Checkpoints",
        "step_8",
        "Sizes of writes",
        "Time saved",
    ];
    for text in parts {
        let dom = shown.as_ref().unwrap_or(&html);
        assert!(dom.contains(text), "{text}: {dom}");
    }
    if let Some(dom) = shown {
        // The script ran to its end: it adds one tip for each chart.
        assert_eq!(dom.matches("class=\"tip\"").count(), 2, "{dom}");
    }
    // Paths as a user would have them: the picture is in the guide.
    let prefix = sandbox.runtime().join("run");
    let html = html
        .replace(&prefix.display().to_string(), "/ckpt")
        .replace(&backing.display().to_string(), "/scratch/run42");
    let page = sandbox.join("shown.html");
    fs::write(&page, html).expect("write");
    let mut sizes = Vec::new();
    for size in [[1280, 1420], [400, 2400]] {
        let picture = sandbox.join(format!("{}.png", size[0]));
        browser.photograph(&sandbox, &page, size, &picture);
        sizes.push(fs::metadata(&picture).expect("a picture").len());
    }
    assert!(sizes.iter().all(|size| *size > 20_000), "{sizes:?}");
    if std::env::var_os("FIRN_RECORD").is_some() {
        let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join(PICTURE);
        fs::copy(sandbox.join("1280.png"), picture).expect("keep the picture");
    }
}

/// Proves S-seen-12: a browser runs nothing of a name.
#[test]
fn a_name_that_looks_like_markup_is_text_on_the_page() {
    let browser = Browser::find();
    let sandbox = Sandbox::new("report-hostile");
    let page = sandbox.join("run.html");
    let script = r#"
        name="$FIRN_PREFIX/<img src=x onerror=document.title=1>"
        mkdir "$name" && printf x > "$name/step_9"
    "#;
    let mut firn = sandbox.firn(["run", "--memory", "64M", "--no-preload", "--report"]);
    firn.arg(&page).args(["--", "sh", "-c", script]);
    run(&mut firn).ok();
    let html = fs::read_to_string(&page).expect("the page");
    let dom = browser.dump(&sandbox, &page).unwrap_or(html);
    assert!(dom.contains("&lt;img src=x"), "{dom}");
    assert!(!dom.contains("<img"), "a name became markup: {dom}");
    assert!(dom.contains("<title>Firn run: "), "a name ran: {dom}");
}

/// A run of a week on many hosts has a page that is no longer than its tables may be.
#[test]
fn two_hundred_checkpoints_are_shown() {
    let browser = Browser::find();
    let sandbox = Sandbox::new("report-many");
    let page = sandbox.join("run.html");
    let script = r#"
        for step in $(seq 205); do echo $step > "$FIRN_PREFIX/step_$step"; done
    "#;
    let mut firn = sandbox.firn(["run", "--memory", "64M", "--no-preload", "--report"]);
    firn.arg(&page).args(["--", "sh", "-c", script]);
    run(&mut firn).ok();
    let html = fs::read_to_string(&page).expect("the page");
    assert!(
        html.contains("step_205") && html.contains("5 older checkpoints"),
        "{html}"
    );
    let picture = sandbox.join("400.png");
    browser.photograph(&sandbox, &page, [400, 12_000], &picture);
    assert!(fs::metadata(&picture).expect("a picture").len() > 20_000);
}

#[test]
fn the_picture_of_the_guide_is_small_enough_to_be_kept() {
    let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join(PICTURE);
    let size = fs::metadata(&picture)
        .expect("run with FIRN_RECORD=1")
        .len();
    assert!(size <= PICTURE_BYTES_MAX, "{size} bytes");
}

#[test]
fn a_run_in_memory_alone_leaves_a_page_and_nothing_else() {
    let sandbox = Sandbox::new("report-memory");
    let page = sandbox.join("run.html");
    let mut firn = sandbox.firn(["run", "--memory", "64M", "--no-preload", "--report"]);
    firn.arg(&page);
    firn.args(["--", "sh", "-c", "echo hello > \"$FIRN_PREFIX/step_1\""]);
    run(&mut firn).ok();
    let html = fs::read_to_string(&page).expect("a page");
    assert!(html.contains("step_1") && html.contains("6 B"), "{html}");
    assert_eq!(sandbox.arenas(), Vec::<PathBuf>::new());
}

/// Proves S-seen-11.
#[test]
fn the_hosts_of_a_job_are_on_one_page_and_damage_is_named() {
    let shared = Sandbox::new("report-hosts");
    let backing = shared.join("backing");
    let hosts: Vec<Sandbox> = (0..2)
        .map(|at| Sandbox::on_host(&format!("report-host{at}"), &format!("n{at}")))
        .collect();
    let options = "arena-size=64M,layout=log,record-in=backing";
    let mounts: Vec<FirnMount<'_>> = hosts
        .iter()
        .map(|host| FirnMount::over(host, &backing, options))
        .collect();
    for (at, mount) in mounts.iter().enumerate() {
        fs::write(mount.join(format!("step_{at}")), vec![7; 100_000]).expect("write");
    }
    mounts.into_iter().for_each(|mount| drop(mount.umount()));
    let found = records(&hosts[0], &backing);
    let names: Vec<&Value> = found.iter().map(|record| &record["host"]).collect();
    assert_eq!(names, ["n0", "n1"]);
    let (code, html, _) = report(&hosts[0], &backing);
    assert_eq!(code, 0);
    assert!(html.contains("2 hosts") && html.contains("step_0") && html.contains("step_1"));

    // A host that was never there reads both from the backing.
    let other = Sandbox::on_host("report-other", "n9");
    assert_eq!(records(&other, &backing).len(), 2);

    // One that is cut off, one that is no record, and one that another user could have put there.
    let dir = backing.join(".firn/records");
    let one = fs::read_dir(&dir)
        .expect("records")
        .map(|entry| entry.expect("an entry").path())
        .find(|path| path.to_string_lossy().contains("n1@"))
        .expect("the record of n1");
    let whole = fs::read(&one).expect("read");
    fs::write(&one, &whole[..whole.len() / 2]).expect("cut off");
    let (code, html, told) = report(&hosts[0], &backing);
    assert_eq!(code, 3);
    assert!(told.contains("damaged") && told.contains("n1@"), "{told}");
    assert!(html.contains("1 host") && html.contains("Look at this first"));
    fs::write(&one, "[1, 2").expect("no record");
    assert_eq!(report(&hosts[0], &backing).0, 3);
    fs::remove_file(&one).expect("remove");
    std::os::unix::fs::symlink("/etc/passwd", &one).expect("symlink");
    let (code, html, _) = report(&hosts[0], &backing);
    assert_eq!(code, 3);
    assert!(!html.contains("root:"), "{html}");
}

#[test]
fn a_backing_without_a_record_says_what_to_do() {
    let sandbox = Sandbox::new("report-none");
    let backing = sandbox.join("backing");
    let args = ["report".as_ref(), backing.as_os_str()];
    sandbox.run(args).code(10).says("record-in=backing");
    // A record in the runtime directory that is damaged is told of, and never believed.
    let mount = FirnMount::new(&sandbox, "arena-size=64M");
    mount.umount();
    let record = fs::read_dir(sandbox.runtime())
        .expect("the runtime directory")
        .map(|entry| entry.expect("an entry").path())
        .find(|path| path.extension().is_some_and(|one| one == "record"))
        .expect("a record");
    fs::write(&record, "{}").expect("damage it");
    sandbox.run(args).code(10).says("cannot be read");
}

/// Proves S-seen-10.
#[test]
fn events_tell_of_a_kill_a_takeover_and_the_end() {
    let sandbox = Sandbox::new("events");
    let mount = FirnMount::new(&sandbox, "arena-size=64M,drain=demand,close=held");
    fs::write(mount.join("step_1"), vec![7; 100_000]).expect("write");
    let backing = mount.kill();
    let mount = FirnMount::new(&sandbox, "arena-size=64M,drain=demand,close=held");
    let mut follow = sandbox.firn(["events", "--follow"]);
    follow.arg(mount.path());
    let told = sandbox.join("told");
    let file = fs::File::create(&told).expect("create");
    let mut follow = follow.stdout(file).spawn().expect("start");
    wait_until("the events until now", Duration::from_secs(60), || {
        fs::read_to_string(&told).is_ok_and(|text| text.lines().count() >= 4)
    });
    mount.umount();
    wait_until("the end", Duration::from_secs(60), || {
        fs::read_to_string(&told).is_ok_and(|text| text.contains("unmounted"))
    });
    follow.kill().expect("kill");
    follow.wait().expect("wait");
    let args = ["events".as_ref(), backing.as_os_str()];
    let text = sandbox.run(args).ok().stdout;
    assert_eq!(text, fs::read_to_string(&told).expect("read"));
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let kinds: Vec<&Value> = lines.iter().map(|line| &line["kind"]).collect();
    assert_eq!(
        kinds,
        ["mounted", "taken_over", "recovered", "mounted", "unmounted"]
    );
    assert_eq!(lines[2]["recovered_bytes"], 100_000);
    for line in &lines {
        let kind = firn_protocol::events::find(line["kind"].as_str().expect("a kind"));
        let fields = kind.expect("a kind of the table").fields;
        let common = ["time", "host", "mount_point", "kind"];
        for name in line.as_object().expect("an object").keys() {
            let is_known = fields.iter().any(|(field, _)| field == name);
            assert!(is_known || common.contains(&name.as_str()), "{line}");
        }
    }
}

/// Proves S-seen-10.
#[test]
fn a_full_arena_is_an_event_with_a_beginning_and_an_end() {
    let sandbox = Sandbox::new("events-full");
    let mount = FirnMount::new(&sandbox, "arena-size=32M,chunk-size=1M,io-threads=1");
    let mut file = fs::File::create(mount.join("step_1")).expect("create");
    let full = || {
        let args = ["events".as_ref(), mount.path().as_os_str()];
        let text = sandbox.run(args).ok().stdout;
        text.contains("arena_full") && text.contains("arena_has_room")
    };
    // More than the arena holds, until writers waited long enough to be seen.
    let bytes = vec![7; 1 << 20];
    wait_until("a full arena", Duration::from_secs(120), || {
        for _ in 0..64 {
            file.write_all(&bytes).expect("write");
        }
        file.set_len(0).expect("truncate");
        std::io::Seek::rewind(&mut file).expect("rewind");
        full()
    });
    drop(file);
    mount.umount();
}

#[test]
fn each_kind_of_event_is_in_the_manual() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/features/watching.md");
    let page = fs::read_to_string(page).expect("the page");
    for kind in firn_protocol::events::KINDS {
        let fields: Vec<String> = kind
            .fields
            .iter()
            .map(|(name, what)| format!("`{name}` ({what})"))
            .collect();
        let row = format!(
            "| `{}` | {} | {} |",
            kind.kind,
            kind.help,
            fields.join(", ")
        );
        assert!(
            page.contains(&row),
            "docs/features/watching.md lacks\n{row}"
        );
    }
}
