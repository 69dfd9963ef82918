//! `firn run` in jobs of a real Slurm: two hosts with a slurmd each, a controller, and a user that is not root.
//!
//! Needs root, FUSE and Debian's slurm-wlm, munge and openmpi-bin (`scripts/setup`). All of Slurm runs in namespaces of its own and ends with the
//! test (`programs/slurm_cluster.sh`). Steps are tracked by cgroups (proctrack/cgroup), of v2 and, where the machine has it, of v1.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use firn_tests::command::{Outcome, run, write_program};
use firn_tests::sandbox::{firn_binary, kill};
use firn_tests::{Sandbox, wait_until};

const HOSTS: [&str; 2] = ["n1", "n2"];
/// The user `nobody`, which submits the jobs.
const USER: u32 = 65534;
/// Slurm looks at time limits every 30 s, and other tests use the processors at the same time.
const LIMIT: Duration = Duration::from_secs(180);
/// Seconds without an answer of its slurmd from which on a host is down: in tests whose hosts stay up, longer than a busy
/// machine delays an answer.
const DOWN_AFTER_S: u32 = 60;
/// The same in tests that kill a host.
const KILLED_DOWN_AFTER_S: u32 = 8;
/// Where the processes of steps are found (proctrack/cgroup): in the freezer of cgroup v1, or in cgroup v2.
const FREEZER: &str = "/sys/fs/cgroup/freezer";
const BLOCK: usize = 3_000_000;

/// A Slurm of its own, which ends with the value.
struct Cluster {
    /// `unshare`, whose only child is the first process of the cluster.
    outer: Child,
    /// That child.
    first: u32,
    _sandbox: Sandbox,
    dir: PathBuf,
    /// Directory of the cgroups of a host, before `-HOST`.
    cgroup: PathBuf,
}

/// Where cgroup v2 is mounted: alone, or beside v1.
fn cgroup_v2() -> PathBuf {
    let mounts = fs::read_to_string("/proc/mounts").expect("the mounts");
    let mut fields = mounts.lines().map(|line| line.split(' '));
    let found = fields.find_map(|mut fields| {
        let point = fields.nth(1)?;
        (fields.next()? == "cgroup2").then(|| PathBuf::from(point))
    });
    found.expect("a mount of cgroup2")
}

impl Cluster {
    fn start(name: &str, hierarchy: &Path, down_after_s: u32) -> Self {
        for program in ["slurmctld", "slurmd", "munged", "ip"] {
            assert!(
                run(Command::new("sh").args(["-c", &format!("command -v {program}")])).code == 0,
                "{program} is missing: install slurm-wlm, munge and iproute2 (scripts/setup)"
            );
        }
        let sandbox = Sandbox::new(name);
        let dir = sandbox.mkdir("cluster");
        install_site(&dir);
        let cgroup = format!("firn-test-{}-{name}", std::process::id());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/slurm_cluster.sh");
        // It ends with this thread, however that ends.
        let mut command = Command::new("setpriv");
        command
            .args([
                "--pdeathsig",
                "KILL",
                "unshare",
                "--mount",
                "--net",
                "--uts",
                "--ipc",
            ])
            .args(["--pid", "--fork", "--kill-child", "--mount-proc", "bash"])
            .arg(script)
            .arg(&dir)
            .arg(firn_binary().parent().expect("a directory"))
            .arg(&cgroup)
            .arg(hierarchy)
            .arg(down_after_s.to_string())
            .args(HOSTS)
            .stdin(Stdio::null())
            .stdout(fs::File::create(sandbox.join("cluster.log")).expect("a log"))
            .stderr(Stdio::inherit());
        let outer = command.spawn().expect("start a cluster");
        let mut cluster = Self {
            outer,
            first: 0,
            _sandbox: sandbox,
            dir,
            cgroup: hierarchy.join(cgroup),
        };
        wait_until("the cluster has a first process", LIMIT, || {
            cluster.first = children_of(cluster.outer.id())
                .first()
                .copied()
                .unwrap_or(0);
            cluster.first != 0
        });
        wait_until("both hosts are idle", LIMIT, || {
            cluster.states() == HOSTS.map(|host| format!("{host} idle"))
        });
        cluster
    }

    /// A program in the cluster, on the controller, by the user of the jobs or by root.
    fn command(&self, user: u32, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args([
                "-t",
                &self.first.to_string(),
                "-m",
                "-n",
                "-u",
                "-i",
                "-p",
                "--",
            ])
            .args(["setpriv", "--clear-groups"])
            .arg(format!("--reuid={user}"))
            .arg(format!("--regid={user}"))
            .args([
                "env",
                "-i",
                "HOME=/tmp",
                "FIRN_SYSTEM_LOG=off",
                "NO_COLOR=1",
            ])
            .arg(format!(
                "PATH={}:/usr/sbin:/usr/bin:/sbin:/bin",
                self.dir.join("bin").display()
            ))
            .arg(format!(
                "SLURM_CONF={}",
                self.dir.join("slurm.conf").display()
            ))
            .arg(program);
        command
    }

    /// `HOST STATE` of each host.
    fn states(&self) -> Vec<String> {
        let mut command = self.command(0, "timeout");
        command.args(["5", "sinfo", "-h", "-N", "-o", "%N %T"]);
        let outcome = run(&mut command);
        outcome.stdout.lines().map(str::to_owned).collect()
    }

    fn scratch(&self, name: &str) -> PathBuf {
        self.dir.join("scratch").join(name)
    }

    /// Submits a job in which `firn run` with `options` runs `command`, a script for sh(1).
    fn submit(&self, name: &str, sbatch: &[&str], options: &str, command: &str) -> Job<'_> {
        let backing = self.scratch(&format!("{name}.backing"));
        let run = format!(
            "exec firn run --memory 64M --backing {} {options} -- sh -c '{command}'",
            backing.display()
        );
        self.submit_script(name, sbatch, backing, &run)
    }

    /// Submits a script for bash(1).
    fn submit_script(&self, name: &str, sbatch: &[&str], backing: PathBuf, text: &str) -> Job<'_> {
        let script = self.scratch(&format!("{name}.sh"));
        write_program(&script, &format!("#!/bin/bash\ncd /\n{text}\n"));
        let mut submit = self.command(USER, "sbatch");
        submit
            .args([
                "--parsable",
                "-N",
                "2",
                "--ntasks-per-node=1",
                "--mem=500",
                "-D",
                "/tmp",
            ])
            .arg("-o")
            .arg(self.scratch(&format!("{name}.out")))
            .args(sbatch)
            .arg(&script);
        let id = run(&mut submit).ok().stdout.trim().to_owned();
        Job {
            cluster: self,
            name: name.to_owned(),
            id,
            backing,
        }
    }

    /// The processes of a host; the first is its init.
    fn processes_of(&self, host: &str) -> Vec<u32> {
        let inits: Vec<u32> = children_of(self.first)
            .into_iter()
            .flat_map(children_of)
            .filter(|pid| command_line(*pid).contains(&format!("\0_\0{host}\0")))
            .collect();
        let [init] = inits[..] else {
            panic!("{host} has {inits:?} as its first process");
        };
        let space = fs::read_link(format!("/proc/{init}/ns/pid")).expect("its namespace");
        let mut processes: Vec<u32> = fs::read_dir("/proc")
            .expect("/proc")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|pid| {
                fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|other| other == space)
            })
            .collect();
        processes.retain(|pid| *pid != init);
        processes.insert(0, init);
        processes
    }

    /// kill -9 of all that runs on a host: the memory of its arenas stays.
    fn kill_host(&self, host: &str) {
        loop {
            let processes = self.processes_of(host);
            let living: Vec<u32> = processes[1..]
                .iter()
                .copied()
                .filter(|pid| !matches!(name_of(*pid).as_str(), "sleep" | ""))
                .collect();
            if living.is_empty() {
                return;
            }
            living.iter().for_each(|pid| kill(*pid, libc::SIGKILL));
        }
    }

    fn start_host(&self, host: &str) {
        fs::write(self.dir.join(format!("up.{host}")), "").expect("start a host");
    }

    /// Nothing of a job is on any host, and Slurm finds nothing wrong with them.
    fn assert_nothing_left(&self) {
        wait_until("Slurm has no job and idle hosts", LIMIT, || {
            self.states() == HOSTS.map(|host| format!("{host} idle"))
        });
        self.assert_nothing_left_on(&HOSTS);
    }

    fn assert_nothing_left_on(&self, hosts: &[&str]) {
        for host in hosts {
            let processes = self.processes_of(host);
            wait_until("no process of Firn is left", LIMIT / 6, || {
                let names = self.processes_of(host).into_iter().map(name_of);
                !names.into_iter().any(|name| name.starts_with("firn"))
            });
            let root = PathBuf::from(format!("/proc/{}", processes[0]));
            let mounts = fs::read_to_string(root.join("mounts")).expect("its mounts");
            assert!(!mounts.contains("fuse.firn"), "{mounts}");
            let memory = root.join(format!("root/dev/shm/firn-{USER}"));
            let left: Vec<PathBuf> = fs::read_dir(memory)
                .into_iter()
                .flatten()
                .map(|entry| entry.expect("an entry").path())
                .filter(|path| !is_kept(path))
                .collect();
            assert!(left.is_empty(), "{host} has {left:?}");
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if thread::panicking() {
            for log in [
                "site",
                "slurmctld",
                "slurmd.n1",
                "slurmd.n2",
                "n1",
                "n2",
                "munged",
            ] {
                let text = fs::read_to_string(self.dir.join("log").join(log)).unwrap_or_default();
                eprintln!("--- {log}\n{}", firn_tests::sandbox::tail(&text, 25));
            }
        }
        // The kernel kills what is in a process namespace with its first process.
        kill(self.first, libc::SIGKILL);
        self.outer.kill().ok();
        self.outer.wait().ok();
        for host in HOSTS {
            remove_cgroup(&PathBuf::from(format!("{}-{host}", self.cgroup.display())));
        }
    }
}

/// The scripts for sites of `examples/slurm`, with settings for these hosts.
fn install_site(dir: &Path) {
    let site = dir.join("site");
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/slurm");
    run(Command::new("cp").arg("-r").arg(examples).arg(&site)).ok();
    let (shown, programs) = (dir.display(), dir.join("bin"));
    let settings = site.join("site.sh");
    let mut text = fs::read_to_string(&settings).expect("the settings");
    for (name, value) in [
        ("firn", programs.join("firn").display().to_string()),
        (
            "preload",
            programs.join("libfirn_preload.so").display().to_string(),
        ),
        ("wish", format!("{shown}/scratch/wish")),
        ("point", "/dev/shm/ckpt.$SLURM_JOB_ID".to_owned()),
        ("options", "arena-size=32M,layout=log,close=held".to_owned()),
    ] {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{name}=")));
        let line = line
            .unwrap_or_else(|| panic!("no {name}: {text}"))
            .to_owned();
        text = text.replace(&line, &format!("{name}={value}"));
    }
    // There is no system log in the cluster.
    text += &format!(
        "export FIRN_SYSTEM_LOG=off\ntell() {{ echo \"$SLURM_JOB_ID: $*\" >> {shown}/log/site; }}\n"
    );
    fs::write(&settings, text).expect("write the settings");
}

/// Removes a cgroup as soon as its processes have ended.
fn remove_cgroup(dir: &Path) {
    let until = Instant::now() + Duration::from_secs(10);
    while dir.exists() && Instant::now() < until {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                remove_cgroup(&entry.path());
            }
        }
        if fs::remove_dir(dir).is_err() {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn children_of(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

fn command_line(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).into_owned()
}

/// Name of a process that has not ended.
fn name_of(pid: u32) -> String {
    if firn_tests::sandbox::is_zombie(pid) {
        return String::new();
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

struct Job<'a> {
    cluster: &'a Cluster,
    name: String,
    id: String,
    backing: PathBuf,
}

impl Job<'_> {
    /// What the job has printed.
    fn output(&self) -> String {
        let output = self.cluster.scratch(&format!("{}.out", self.name));
        fs::read_to_string(output).unwrap_or_default()
    }

    #[track_caller]
    fn wait_for_output(&self, what: &str, count: usize) {
        let until = Instant::now() + LIMIT;
        while self.output().matches(what).count() < count {
            assert!(Instant::now() < until, "no {what:?}: {}", self.output());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Tells the command that it may end.
    fn let_go(&self) {
        fs::write(self.cluster.scratch(&format!("{}.go", self.name)), "").expect("let go");
    }

    /// Waits for the end of the job and gives its state and exit code, as Slurm has them.
    #[track_caller]
    fn wait(&self) -> String {
        let mut last = String::new();
        wait_until("the job ends", LIMIT, || {
            let outcome = self.control(&["show", "job", "--oneliner", &self.id]);
            last = ["JobState=", "ExitCode="]
                .iter()
                .filter_map(|key| {
                    let (_, rest) = outcome.stdout.split_once(&format!(" {key}"))?;
                    rest.split_whitespace().next()
                })
                .collect::<Vec<_>>()
                .join(" ");
            !["PENDING", "RUNNING", "COMPLETING"]
                .iter()
                .any(|state| last.starts_with(state))
        });
        last
    }

    fn control(&self, args: &[&str]) -> Outcome {
        run(self.cluster.command(0, "scontrol").args(args))
    }

    #[track_caller]
    fn assert_file(&self, name: &str, expected: &[u8]) {
        let found = fs::read(self.backing.join(name));
        let found = found.unwrap_or_else(|error| panic!("{name}: {error}: {}", self.output()));
        assert!(
            found == expected,
            "{name} has {} of {} bytes, or others: {}",
            found.len(),
            expected.len(),
            self.output()
        );
    }
}

/// The ranks' checkpoint, and what they write when they are asked to end.
const SOLVER: &str = r#"exec srun --kill-on-bad-exit=0 sh -c "
    trap \"echo last > \$FIRN_PREFIX/last.\$SLURM_PROCID; exit 0\" TERM
    tr \"\\\\0\" \$SLURM_PROCID < /dev/zero | head -c 3000000 > \$FIRN_PREFIX/step.\$SLURM_PROCID
    echo written
    while :; do sleep 0.1; done""#;

fn block_of(rank: usize) -> Vec<u8> {
    vec![b'0' + rank as u8; BLOCK]
}

/// Steps one after the other have the same mounts, which are gone after the job, and MPI-IO finds what it needs.
fn end_of_a_job(cluster: &Cluster) {
    let command = r#"srun sh -c "echo \$SLURM_PROCID > \$FIRN_PREFIX/first.\$SLURM_PROCID"
        srun -N 1 -n 1 -w n2 sh -c "cat \$FIRN_PREFIX/first.*; cat \$ROMIO_HINTS; echo \$OMPI_MCA_fbtl_posix_write_datasieving"
        srun sh -c "echo more >> \$FIRN_PREFIX/first.\$SLURM_PROCID""#;
    let job = cluster.submit("end", &[], "", command);
    assert_eq!(job.wait(), "COMPLETED 0:0", "{}", job.output());
    let output = job.output();
    assert!(
        output.contains("0\n1\nromio_ds_write disable\nfalse\n"),
        "{output}"
    );
    assert!(
        output.contains("the command succeeded; everything of 2 hosts is durable in "),
        "{output}"
    );
    for rank in 0..2 {
        job.assert_file(
            &format!("first.{rank}"),
            format!("{rank}\nmore\n").as_bytes(),
        );
    }
}

/// What the ranks held, and what they write at SIGTERM, is durable when the job is over.
fn assert_saved(job: &Job<'_>) {
    for rank in 0..2 {
        job.assert_file(&format!("step.{rank}"), &block_of(rank));
        job.assert_file(&format!("last.{rank}"), b"last\n");
    }
    let output = job.output();
    assert!(
        output.contains("everything of 2 hosts is durable in "),
        "{output}"
    );
    assert!(
        !output.contains("lost") && !output.contains("not "),
        "{output}"
    );
}

fn cancel(cluster: &Cluster) {
    let job = cluster.submit("cancel", &[], "-o drain=demand", SOLVER);
    job.wait_for_output("written", 2);
    run(cluster.command(USER, "scancel").arg(&job.id)).ok();
    assert!(job.wait().starts_with("CANCELLED"), "{}", job.output());
    assert_saved(&job);
}

fn time_limit(cluster: &Cluster) {
    let job = cluster.submit("limit", &["--time=2"], "-o drain=demand", SOLVER);
    job.wait_for_output("written", 2);
    let job_id = format!("JobId={}", job.id);
    // Not in the second in which it began.
    wait_until("the job has a time limit", LIMIT, || {
        job.control(&["update", &job_id, "EndTime=now"]).code == 0
    });
    assert!(job.wait().starts_with("TIMEOUT"), "{}", job.output());
    assert_saved(&job);
}

/// A signal some time before the limit, as of `--signal=TERM@300`: the ranks end by themselves.
fn signal_before_the_limit(cluster: &Cluster) {
    let job = cluster.submit("signal", &["--time=5"], "", SOLVER);
    job.wait_for_output("written", 2);
    let mut signal = cluster.command(USER, "scancel");
    run(signal.arg("--signal=TERM").arg(&job.id)).ok();
    assert!(job.wait().starts_with("COMPLETED 0:0"), "{}", job.output());
    assert_saved(&job);
}

/// MPI-IO through both libraries of Open MPI, with nothing set by the job: the bytes are those of one rank on a plain directory.
fn mpi_io(cluster: &Cluster) {
    let program = cluster.scratch("mpi_io");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/mpi_io.c");
    run(Command::new("mpicc")
        .args(["-O1", "-o"])
        .arg(&program)
        .arg(source))
    .ok();
    let plain = cluster.scratch("plain");
    let mut one = Command::new("mpirun");
    one.args(["--allow-run-as-root", "-n", "1"]).arg(&program);
    run(one
        .arg("write")
        .arg(&plain)
        .args(["segmented", "collective"]))
    .ok();
    let command = r#"for io in ompio romio321; do
            mpirun --mca io $io -n 4 --map-by node --oversubscribe "$0" write $FIRN_PREFIX/$io strided independent || exit
        done"#;
    let command = command.replace("$0", &program.display().to_string());
    let job = cluster.submit("mpi", &[], "", &command);
    assert_eq!(job.wait(), "COMPLETED 0:0", "{}", job.output());
    let expected = fs::read(plain).expect("the file of one rank");
    for io in ["ompio", "romio321"] {
        job.assert_file(io, &expected);
    }
}

/// SIGKILL for all, as after `KillWait`: only the epilog of the site drains.
fn kill_all(cluster: &Cluster) {
    let job = cluster.submit("kill", &[], "-o drain=demand", SOLVER);
    job.wait_for_output("written", 2);
    let mut signal = cluster.command(USER, "scancel");
    run(signal.args(["--full", "--signal=KILL"]).arg(&job.id)).ok();
    job.wait();
    wait_until("the epilogs have recovered the ranks' files", LIMIT, || {
        (0..2).all(|rank| {
            let file = job.backing.join(format!("step.{rank}"));
            fs::metadata(file).is_ok_and(|file| file.len() == BLOCK as u64)
        })
    });
    for rank in 0..2 {
        job.assert_file(&format!("step.{rank}"), &block_of(rank));
    }
}

/// A mount by the prolog, for a job that knows nothing of it.
fn mount_of_the_site(cluster: &Cluster) {
    let wish = cluster.scratch("wish");
    let text = r#"srun sh -c "echo \$SLURM_PROCID > \$FIRN_PREFIX/of.\$SLURM_PROCID; echo \$FIRN_PREFIX; cat \$ROMIO_HINTS""#;
    let job = cluster.submit_script("site", &[], wish.clone(), text);
    assert_eq!(job.wait(), "COMPLETED 0:0", "{}", job.output());
    let point = format!("/dev/shm/ckpt.{}\nromio_ds_write disable\n", job.id);
    assert!(job.output().contains(&point), "{}", job.output());
    let backing = wish.join(&job.id);
    wait_until("the epilogs have drained", LIMIT, || {
        (0..2).all(|rank| {
            let file = fs::read_to_string(backing.join(format!("of.{rank}")));
            file.is_ok_and(|text| text == format!("{rank}\n"))
        })
    });
}

/// Proves S-run-1, S-run-2, S-run-3.
#[test]
fn jobs_of_slurm_leave_their_files_and_nothing_else() {
    check_jobs(&Cluster::start("slurm", &cgroup_v2(), DOWN_AFTER_S));
}

/// Proves S-run-1, S-run-2, S-run-3.
#[test]
fn jobs_of_slurm_with_cgroup_v1_leave_their_files_and_nothing_else() {
    let freezer = Path::new(FREEZER);
    if freezer.is_dir() {
        check_jobs(&Cluster::start("slurmv1", freezer, DOWN_AFTER_S));
    } else {
        println!("not run: this machine has no cgroup v1");
    }
}

fn check_jobs(cluster: &Cluster) {
    thread::scope(|scope| {
        // The one that waits longest first.
        let cases = [
            time_limit,
            end_of_a_job,
            cancel,
            signal_before_the_limit,
            kill_all,
            mpi_io,
        ];
        for case in cases {
            scope.spawn(move || case(cluster));
        }
    });
    // Now each job has a mount of the site, too.
    let wish = cluster.scratch("wish");
    fs::create_dir(&wish).expect("a directory");
    std::os::unix::fs::chown(&wish, Some(USER), Some(USER)).expect("chown");
    mount_of_the_site(cluster);
    cluster.assert_nothing_left();
}

/// Proves S-run-2, S-run-4.
#[test]
fn a_host_of_a_slurm_job_dies_and_what_was_durable_or_comes_back_is_there() {
    let cluster = Cluster::start("slurmdead", &cgroup_v2(), KILLED_DOWN_AFTER_S);
    let command = r#"srun sh -c "
            tr \"\\\\0\" \$SLURM_PROCID < /dev/zero | head -c 3000000 > \$FIRN_PREFIX/step.\$SLURM_PROCID
            firn wait -q --until durable \$FIRN_PREFIX/step.\$SLURM_PROCID
            echo held > \$FIRN_PREFIX/held.\$SLURM_PROCID"
        echo ready
        until test -e "$0"; do sleep 0.1; done"#;
    let go = cluster.scratch("dead.go");
    let command = command.replace("$0", &go.display().to_string());
    let job = cluster.submit(
        "dead",
        &["--no-kill"],
        "--host-timeout 5 -o drain=demand",
        &command,
    );
    job.wait_for_output("ready", 1);
    for rank in 0..2 {
        job.assert_file(&format!("step.{rank}"), &block_of(rank));
    }
    cluster.kill_host("n2");
    job.wait_for_output("n2 does not answer any more", 1);
    job.let_go();
    assert!(job.wait().starts_with("FAILED 1:0"), "{}", job.output());
    let output = job.output();
    let recover = format!(
        "srun -N 1 -n 1 -w n2 firn recover {}",
        job.backing.display()
    );
    assert!(
        output.contains("n2 is lost") && output.contains(&recover),
        "{output}"
    );
    job.assert_file("held.0", b"held\n");
    job.assert_file("step.1", &block_of(1));
    // The host was not rebooted.
    cluster.start_host("n2");
    wait_until("Slurm has both hosts again", LIMIT, || {
        cluster.states() == HOSTS.map(|host| format!("{host} idle"))
    });
    let (program, args) = recover.split_once(' ').expect("a program");
    run(cluster.command(USER, program).args(args.split(' '))).ok();
    job.assert_file("held.1", b"held\n");
    job.assert_file("step.1", &block_of(1));
}

/// Proves S-run-2, S-run-4: Slurm ends a job that has lost a host, where the user has not asked for `--no-kill`.
#[test]
fn a_job_that_slurm_ends_with_a_lost_host_is_drained_on_the_other() {
    let cluster = Cluster::start("slurmnokill", &cgroup_v2(), KILLED_DOWN_AFTER_S);
    let command = r#"srun sh -c "
            tr \"\\\\0\" \$SLURM_PROCID < /dev/zero | head -c 3000000 > \$FIRN_PREFIX/step.\$SLURM_PROCID
            firn wait -q --until durable \$FIRN_PREFIX/step.\$SLURM_PROCID
            echo held > \$FIRN_PREFIX/held.\$SLURM_PROCID"
        echo ready
        while :; do sleep 0.1; done"#;
    let options = "--host-timeout 60 -o drain=demand";
    let job = cluster.submit("nokill", &["--no-requeue"], options, command);
    job.wait_for_output("ready", 1);
    for rank in 0..2 {
        job.assert_file(&format!("step.{rank}"), &block_of(rank));
    }
    cluster.kill_host("n2");
    assert!(job.wait().starts_with("NODE_FAIL"), "{}", job.output());
    // By `firn run` at SIGTERM, or else by the epilog.
    wait_until("the host that lives is drained", LIMIT, || {
        fs::read(job.backing.join("held.0")).is_ok_and(|bytes| bytes == b"held\n")
    });
    cluster.start_host("n2");
    wait_until("Slurm has both hosts again", LIMIT, || {
        cluster.states() == HOSTS.map(|host| format!("{host} idle"))
    });
    let mut recover = cluster.command(USER, "srun");
    recover.args(["-N", "1", "-n", "1", "-w", "n2", "firn", "recover"]);
    run(recover.arg(&job.backing)).ok();
    for rank in 0..2 {
        job.assert_file(&format!("held.{rank}"), b"held\n");
        job.assert_file(&format!("step.{rank}"), &block_of(rank));
    }
    cluster.assert_nothing_left_on(&HOSTS[..1]);
}

/// A log, or the record of a mount, which stay for `firn report`.
fn is_kept(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("log" | "record" | "events"))
}
