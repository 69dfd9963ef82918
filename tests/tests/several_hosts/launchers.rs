//! `firn run` on several hosts by a remote shell, PBS and Flux. A host is a holder of namespaces, and a script takes the place of ssh:
//! it gives a host a command line as ssh does, and hands on nothing else.
//!
//! Flux is a script too, which understands what `firn run` asks of the real one: no package of Debian has Flux.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firn_tests::command::{Outcome, exit_code, run, wait_child, write_program};
use firn_tests::sandbox::{firn_binary, is_zombie, kill};
use firn_tests::sshd::Sshd;
use firn_tests::{Sandbox, wait_until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// Hosts with a name, mounts, processes and a /dev/shm of their own.
struct Hosts {
    sandbox: Sandbox,
    /// Each has a kernel of its own, as far as that can be seen from its boot id.
    are_machines: bool,
    holders: Vec<(String, Child)>,
}

impl Hosts {
    fn new(name: &str, count: usize) -> Self {
        Self::with(name, count, false)
    }

    fn with(name: &str, count: usize, are_machines: bool) -> Self {
        let sandbox = Sandbox::new(name);
        for dir in ["holders", "shared"] {
            sandbox.mkdir(dir);
        }
        let mut hosts = Self {
            sandbox,
            are_machines,
            holders: Vec::new(),
        };
        let shell = "#!/bin/sh\n\
            # HOST LINE: into the namespaces of that host, with an environment of its own.\n\
            pid=$(cat \"$(dirname \"$0\")/holders/$1\") || exit 255\n\
            exec nsenter -t \"$pid\" -m -u -i -p -- env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin FIRN_SYSTEM_LOG=off sh -c \"$2\"\n";
        hosts.write_program("shell", shell);
        for number in 1..=count {
            hosts.add(&format!("h{number}"));
        }
        hosts
    }

    fn add(&mut self, name: &str) {
        // Mounts of other tests, which this namespace would keep, go.
        let script = r#"awk '$3 == "fuse.firn" { print $2 }' /proc/mounts | xargs -r umount --lazy
            hostname "$1"; cat /proc/sys/kernel/random/uuid > "$2.boot"
            [ -z "$3" ] || mount --bind "$2.boot" /proc/sys/kernel/random/boot_id
            mount -t tmpfs -o mode=1777 firn-test /dev/shm; echo > "$2.up"; exec sleep 3000"#;
        let file = self.sandbox.join("holders").join(name);
        let mut command = Command::new("setpriv");
        command
            .args([
                "--pdeathsig",
                "KILL",
                "unshare",
                "--mount",
                "--uts",
                "--ipc",
                "--pid",
            ])
            .args([
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--propagation",
                "private",
            ])
            .args(["sh", "-c", script, "sh", name])
            .arg(&file)
            .arg(if self.are_machines { "own-boot" } else { "" })
            .stdin(Stdio::null());
        let holder = command.spawn().expect("start a host");
        let up = file.with_extension("up");
        wait_until("a host is up", LIMIT, || up.exists());
        let pid = holder.id();
        let first = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        fs::write(&file, first.expect("its first process").trim()).expect("write its number");
        self.holders.push((name.to_owned(), holder));
    }

    fn write_program(&self, name: &str, text: &str) {
        write_program(&self.sandbox.join(name), text);
    }

    fn first_process(&self, host: &str) -> u32 {
        let pid = fs::read_to_string(self.sandbox.join("holders").join(host));
        pid.expect("its number").trim().parse().expect("a number")
    }

    /// The machine that a host is crashes.
    fn crash(&mut self, host: &str) {
        kill(self.first_process(host), libc::SIGKILL);
        let (_, holder) = self
            .holders
            .iter_mut()
            .find(|(name, _)| name == host)
            .expect("a host");
        holder.wait().expect("wait for it");
    }

    /// The machine starts again, with nothing in its memory.
    fn start_again(&mut self, host: &str) {
        self.holders.retain(|(name, _)| name != host);
        fs::remove_file(self.sandbox.join("holders").join(format!("{host}.up"))).expect("remove");
        self.add(host);
    }

    /// Runs a line for sh(1) on a host.
    fn on(&self, host: &str, line: &str) -> Outcome {
        run(Command::new(self.sandbox.join("shell")).args([host, line]))
    }

    /// The row of a host in `firn hosts`, asked on a host that takes no part.
    fn seen(&self, host: &str) -> Value {
        let backing = self.backing();
        let args = ["hosts".as_ref(), "--json".as_ref(), backing.as_os_str()];
        let job = self.sandbox.run(args).json();
        let hosts = job["hosts"].as_array().expect("hosts");
        let row = hosts.iter().find(|row| row["host"] == host);
        row.cloned().unwrap_or_default()
    }

    fn backing(&self) -> PathBuf {
        self.sandbox.join("shared/backing")
    }

    /// `firn run` by the remote shell on all hosts, with a script for sh(1), in which `on HOST LINE` reaches a host.
    fn firn_run(&self, options: &[&str], script: &str) -> Command {
        let list = self.sandbox.join("list");
        let names: Vec<&str> = self.holders.iter().map(|(name, _)| name.as_str()).collect();
        fs::write(&list, names.join("\n") + "\n").expect("write the list");
        let mut command = self.run_command(options);
        command.arg("--hosts").arg(list);
        self.with_script(command, script)
    }

    fn run_command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(firn_binary());
        self.sandbox.environment(&mut command);
        for name in [
            "SLURM_JOB_ID",
            "PBS_NODEFILE",
            "FLUX_URI",
            "FIRN_RUNTIME_DIR",
        ] {
            command.env_remove(name);
        }
        command
            .args(["run", "--memory", "32M", "--backing"])
            .arg(self.backing())
            .arg("--remote-shell")
            .arg(self.sandbox.join("shell"))
            .args(options);
        command
    }

    fn with_script(&self, mut command: Command, script: &str) -> Command {
        let on = format!(
            "on() {{ {} \"$@\"; }}\n",
            self.sandbox.join("shell").display()
        );
        command.args(["--", "sh", "-c", &format!("{on}{script}")]);
        command
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.backing().join(name)).unwrap_or_else(|error| format!("{error}"))
    }

    /// No host that is up has a mount, a process or an arena.
    fn assert_nothing_left(&mut self) {
        for (name, holder) in &mut self.holders {
            if holder.try_wait().expect("wait").is_some() {
                continue;
            }
            let pid = self.sandbox.join("holders").join(&*name);
            let pid = fs::read_to_string(pid).expect("its number");
            let root = PathBuf::from(format!("/proc/{}", pid.trim()));
            wait_until("a host has no mount", LIMIT, || {
                let mounts = fs::read_to_string(root.join("mounts")).expect("its mounts");
                !mounts.contains("fuse.firn")
            });
            let space = fs::read_link(root.join("ns/pid")).expect("its namespace");
            wait_until("the processes of a host have ended", LIMIT, || {
                processes_in(&space) == [pid.trim().parse::<u32>().expect("a number")]
            });
            let left: Vec<PathBuf> = fs::read_dir(root.join("root/dev/shm/firn-0"))
                .into_iter()
                .flatten()
                .map(|entry| entry.expect("an entry").path())
                .filter(|path| !is_kept(path))
                .collect();
            assert!(left.is_empty(), "{name} has {left:?}");
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for (_, holder) in &mut self.holders {
            holder.kill().ok();
            holder.wait().ok();
        }
    }
}

fn processes_in(space: &PathBuf) -> Vec<u32> {
    let processes = fs::read_dir("/proc").expect("/proc");
    processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|other| other == *space)
        })
        .filter(|pid| !is_zombie(*pid))
        .collect()
}

/// Writes a file on each host, and reads all of them on the last one.
const WRITE_AND_READ: &str = "for h in h1 h2 h3; do on $h \"hostname > $FIRN_PREFIX/of.$h\"; done
    on h3 \"cat $FIRN_PREFIX/of.*\"; on h2 \"cat $ROMIO_HINTS\"; echo $OMPI_MCA_mca_base_env_list";

#[track_caller]
fn assert_ran_on_three(hosts: &mut Hosts, outcome: Outcome) {
    let outcome = outcome.ok();
    let expected = "h1\nh2\nh3\nromio_ds_write disable\n";
    assert!(outcome.stdout.starts_with(expected), "{outcome}");
    assert!(
        outcome.stdout.contains("FIRN_PREFIX;ROMIO_HINTS"),
        "{outcome}"
    );
    assert!(
        outcome
            .stderr
            .contains("the command succeeded; everything of 3 hosts is durable in "),
        "{outcome}"
    );
    for host in ["h1", "h2", "h3"] {
        assert_eq!(hosts.read(&format!("of.{host}")), format!("{host}\n"));
    }
    hosts.assert_nothing_left();
}

/// Proves S-run-1.
#[test]
fn hosts_of_a_list_have_one_mount_each_for_the_life_of_a_command() {
    let mut hosts = Hosts::new("hosts", 3);
    let outcome = run(&mut hosts.firn_run(&[], WRITE_AND_READ));
    assert_ran_on_three(&mut hosts, outcome);
}

/// Proves S-run-1: by a real ssh.
#[test]
fn a_host_is_reached_by_ssh() {
    let sandbox = Sandbox::new("runssh");
    let sshd = Sshd::start(&sandbox);
    let list = sandbox.join("list");
    fs::write(&list, "root@127.0.0.1\n").expect("write the list");
    let firn_run = |key: &str| {
        let mut command = sandbox.firn(["run", "--memory", "32M", "--hosts"]);
        command
            .arg(&list)
            .args(["--remote-shell", &sshd.command(key), "--backing"])
            .arg(sandbox.join("it's a backing"))
            .args(["--prefix"])
            .arg(sandbox.join("mnt"))
            .args(["--", "sh", "-c", "echo data > $FIRN_PREFIX/f"]);
        run(&mut command)
    };
    let refused = firn_run("stranger").code(1);
    assert!(
        refused.stderr.contains("root@127.0.0.1 does not answer"),
        "{refused}"
    );
    firn_run("known").ok().says("everything is durable in");
    let written = fs::read_to_string(sandbox.join("it's a backing/f"));
    assert_eq!(written.expect("the file"), "data\n");
    wait_until("the host's processes have ended", LIMIT, || {
        sandbox.arenas().is_empty() && sandbox.processes().is_empty()
    });
}

/// Proves S-run-1.
#[test]
fn hosts_of_a_pbs_job_have_one_mount_each() {
    let mut hosts = Hosts::new("pbs", 3);
    let list = hosts.sandbox.join("nodes");
    fs::write(&list, "h1\nh1\nh2\nh2\nh3\nh3\n").expect("write the nodes");
    let mut command = hosts.with_script(hosts.run_command(&[]), WRITE_AND_READ);
    command
        .env("PBS_NODEFILE", list)
        .env("PBS_JOBID", "17.server");
    let outcome = run(&mut command);
    assert_ran_on_three(&mut hosts, outcome);
}

/// Proves S-run-1.
#[test]
fn hosts_of_a_flux_instance_have_one_mount_each() {
    let mut hosts = Hosts::new("flux", 3);
    let dir = hosts.sandbox.mkdir("programs");
    // Standard input goes to all, their outputs are one.
    let flux = "#!/bin/bash\n\
        case \"$1 $2\" in\n\
            'hostlist --expand') echo h1 h2 h3 ;;\n\
            'getattr jobid') echo fABC ;;\n\
            'exec --dir=/')\n\
                shift 2; printf -v line ' %q' \"$@\"\n\
                for h in h1 h2 h3; do exec {fd[n++]}> >(exec \"$FLUX_SHELL\" $h \"exec$line\"); pids+=($!); done\n\
                while IFS= read -r order; do for f in \"${fd[@]}\"; do printf '%s\\n' \"$order\" >&$f; done; done\n\
                for f in \"${fd[@]}\"; do exec {f}>&-; done; wait \"${pids[@]}\" ;;\n\
            *) echo \"flux: $*\" >&2; exit 1 ;;\n\
        esac\n";
    hosts.write_program("programs/flux", flux);
    let mut command = hosts.with_script(hosts.run_command(&[]), WRITE_AND_READ);
    command
        .env("FLUX_URI", "local:///nowhere")
        .env("FLUX_SHELL", hosts.sandbox.join("shell"))
        .env(
            "PATH",
            format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", dir.display()),
        );
    let outcome = run(&mut command);
    assert_ran_on_three(&mut hosts, outcome);
}

/// Proves S-run-4.
#[test]
fn a_host_that_crashes_is_named_and_the_others_are_drained() {
    let mut hosts = Hosts::new("hostcrash", 3);
    let ready = hosts.sandbox.join("ready");
    let go = hosts.sandbox.join("go");
    let script = format!(
        "for h in h1 h2 h3; do on $h \"echo $h > $FIRN_PREFIX/of.$h\"; done
        on h2 \"{} wait -q $FIRN_PREFIX/of.h2\"
        echo > {}; until test -e {}; do sleep 0.05; done",
        firn_binary().display(),
        ready.display(),
        go.display()
    );
    let mut command = hosts.firn_run(&["--host-timeout", "5", "-o", "drain=demand"], &script);
    let log = hosts.sandbox.join("messages");
    command.stderr(fs::File::create(&log).expect("a file"));
    let mut child = command.spawn().expect("firn run");
    wait_until("all is written", LIMIT, || ready.exists());
    hosts.crash("h2");
    wait_until("the host is missed", LIMIT, || {
        let told = fs::read_to_string(&log).expect("messages");
        told.contains("h2 does not answer any more")
    });
    fs::write(&go, "").expect("go");
    let status = wait_child(&mut child, LIMIT).expect("it ends");
    let told = fs::read_to_string(&log).expect("messages");
    assert_eq!(exit_code(status), 1, "{told}");
    let recover = format!("shell h2 firn recover {}", hosts.backing().display());
    assert!(
        told.contains("h2 is lost") && told.contains(&recover),
        "{told}"
    );
    for host in ["h1", "h2", "h3"] {
        assert_eq!(
            hosts.read(&format!("of.{host}")),
            format!("{host}\n"),
            "{told}"
        );
    }
    hosts.assert_nothing_left();
}

/// Proves S-run-2.
#[test]
fn hosts_end_by_themselves_what_a_killed_firn_run_began() {
    let mut hosts = Hosts::new("hostkill", 2);
    let ready = hosts.sandbox.join("ready");
    let script = format!(
        "for h in h1 h2; do on $h \"echo $h > $FIRN_PREFIX/of.$h\"; done; echo > {}; exec sleep 600",
        ready.display()
    );
    let mut command = hosts.firn_run(&["-o", "drain=demand"], &script);
    let mut child = command.spawn().expect("firn run");
    wait_until("all is written", LIMIT, || ready.exists());
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()));
    child.kill().expect("kill -9");
    child.wait().expect("wait");
    // The command goes on without it, and does not use the mounts.
    for pid in children.expect("its children").split_whitespace() {
        let pid = pid.parse().expect("a number");
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if line.starts_with("sleep") {
            kill(pid, libc::SIGKILL);
        }
    }
    hosts.assert_nothing_left();
    for host in ["h1", "h2"] {
        assert_eq!(hosts.read(&format!("of.{host}")), format!("{host}\n"));
    }
}

#[test]
fn no_command_runs_where_a_host_cannot_mount() {
    let mut hosts = Hosts::new("hostfail", 2);
    let point = "/dev/shm/taken";
    let shell = hosts.sandbox.join("shell");
    let fill = format!("mkdir {point}; echo mine > {point}/file");
    run(Command::new(&shell).args(["h2", &fill])).ok();
    let outcome = run(&mut hosts.firn_run(&["--prefix", point], "echo started"));
    assert!(outcome.code != 0 && outcome.stdout.is_empty(), "{outcome}");
    assert!(outcome.stderr.contains("h2: "), "{outcome}");
    // One that is not there at all.
    fs::write(hosts.sandbox.join("gone"), "h1\nh9\n").expect("write a list");
    let mut command = hosts.run_command(&[]);
    command.arg("--hosts").arg(hosts.sandbox.join("gone"));
    let outcome = run(&mut hosts.with_script(command, "echo started")).code(1);
    assert!(outcome.stderr.contains("h9 does not answer"), "{outcome}");
    assert!(outcome.stdout.is_empty(), "{outcome}");
    hosts.assert_nothing_left();
}

#[test]
fn hosts_that_stay_keep_the_files_of_a_command_that_failed() {
    let mut hosts = Hosts::new("hostagain", 2);
    let options = ["-o", "layout=plain,tokens=flock"];
    let write = "for h in h1 h2; do on $h \"echo $h > $FIRN_PREFIX/of.$h\"; done; exit 7";
    run(&mut hosts.firn_run(&options, write)).code(7).says(
        "the command failed with exit status 7; 6 B of its files stay in the memory of 2 hosts",
    );
    assert_eq!(hosts.read("of.h1"), "");
    let read = "for h in h1 h2; do on $h \"cat $FIRN_PREFIX/of.$h\"; done";
    let outcome = run(&mut hosts.firn_run(&options, read)).ok();
    assert_eq!(outcome.stdout, "h1\nh2\n");
    outcome.says("everything of 2 hosts is durable in ");
    assert_eq!(hosts.read("of.h2"), "h2\n");
    hosts.assert_nothing_left();
}

/// Proves S-run-5: the command was typed on a host that has no mount of the run.
#[test]
fn a_report_of_several_hosts_is_written_where_the_command_was_typed() {
    let mut hosts = Hosts::new("hostreport", 2);
    let page = hosts.sandbox.join("run.html");
    let report = ["--report", page.to_str().expect("UTF-8")];
    let write = "for h in h1 h2; do on $h \"mkdir $FIRN_PREFIX/step_$h; echo $h > $FIRN_PREFIX/step_$h/rank\"; done";
    let write = write.replace("step_$h", "step_${h#h}");
    let outcome = run(&mut hosts.firn_run(&report, &write)).ok();
    assert!(outcome.stderr.contains("the report is in"), "{outcome}");
    let shown = fs::read_to_string(&page).expect("the page");
    for text in ["2 hosts", ">h1<", ">h2<", "step_1", "step_2", "3 B", "6 B"] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    assert!(!shown.contains("Look at this first"), "{shown}");
    assert!(!shown.contains(">removed<"), "sizes are known: {shown}");
    fs::remove_file(&page).expect("remove");
    // Each host has files of its own, which go with it.
    let mut command = Command::new(firn_binary());
    hosts.sandbox.environment(&mut command);
    command.args(["run", "--memory", "32M", "--hosts"]);
    command.arg(hosts.sandbox.join("list"));
    command
        .arg("--remote-shell")
        .arg(hosts.sandbox.join("shell"));
    command.args(report);
    run(&mut hosts.with_script(command, &write)).ok();
    let shown = fs::read_to_string(&page).expect("the page");
    for text in ["2 hosts", "step_1", "step_2", "6 B"] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    hosts.assert_nothing_left();
}

/// Proves S-run-5: the page has what is known of the host that is lost.
#[test]
fn a_report_names_the_host_that_was_lost() {
    let mut hosts = Hosts::new("hostreplost", 2);
    let page = hosts.sandbox.join("run.html");
    let (ready, go) = (hosts.sandbox.join("ready"), hosts.sandbox.join("go"));
    let script = format!(
        "for h in h1 h2; do on $h \"mkdir -p $FIRN_PREFIX/step_1; echo $h > $FIRN_PREFIX/step_1/$h\"; done
        echo > {}; until test -e {}; do sleep 0.05; done",
        ready.display(),
        go.display()
    );
    let report = [
        "--host-timeout",
        "5",
        "--report",
        page.to_str().expect("UTF-8"),
    ];
    let mut command = hosts.firn_run(&report, &script);
    let log = hosts.sandbox.join("messages");
    command.stderr(fs::File::create(&log).expect("a file"));
    let mut child = command.spawn().expect("firn run");
    wait_until("all is written", LIMIT, || ready.exists());
    hosts.crash("h2");
    wait_until("the host is missed", LIMIT, || {
        let told = fs::read_to_string(&log).expect("messages");
        told.contains("h2 does not answer any more")
    });
    fs::write(&go, "").expect("go");
    let status = wait_child(&mut child, LIMIT).expect("it ends");
    assert_eq!(exit_code(status), 1);
    let shown = fs::read_to_string(&page).expect("the page");
    assert!(
        shown.contains("1 host") && shown.contains(">step_1<"),
        "{shown}"
    );
    assert!(shown.contains("h2 is lost, and left no record"), "{shown}");
    hosts.assert_nothing_left();
}

/// Proves S-run-1: old checkpoints go while several hosts write new ones, and none that may be in the making.
#[test]
fn old_checkpoints_of_several_hosts_go_while_the_command_runs() {
    let mut hosts = Hosts::new("hostkeep", 2);
    let script = "for step in 1 2 3 4; do
            on h1 \"mkdir $FIRN_PREFIX/step_$step\"
            for h in h1 h2; do on $h \"echo $step > $FIRN_PREFIX/step_$step/of.$h\"; done
        done
        while on h1 \"test -e $FIRN_PREFIX/step_2\"; do sleep 0.05; done
        on h2 \"cat $FIRN_PREFIX/step_*/of.*\"";
    let outcome = run(&mut hosts.firn_run(&["--keep", "1"], script)).ok();
    // One more than was asked for: h1 does not know whether h2 still writes the newest.
    assert_eq!(outcome.stdout, "3\n3\n4\n4\n", "{outcome}");
    assert!(!outcome.stderr.contains("cannot remove"), "{outcome}");
    for step in [3, 4] {
        for host in ["h1", "h2"] {
            let name = format!("step_{step}/of.{host}");
            assert_eq!(hosts.read(&name), format!("{step}\n"));
        }
    }
    let names = fs::read_dir(hosts.backing()).expect("the backing");
    let names = names.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = names
        .filter_map(|name| name.into_string().ok())
        .filter(|name| !name.starts_with('.') || name.ends_with(".pruned"))
        .collect();
    names.sort();
    assert_eq!(names, ["step_3", "step_4"]);
    hosts.assert_nothing_left();
}

/// Proves S-partner-31, S-run-4: a host of the run is lost with its memory; the next run, on those that are left, has its files.
#[test]
fn a_run_without_the_lost_host_restarts_from_the_memory_of_its_partner() {
    let mut hosts = Hosts::new("hostrestart", 3);
    let (ready, go) = (hosts.sandbox.join("ready"), hosts.sandbox.join("go"));
    let firn = firn_binary();
    let script = format!(
        "for h in h1 h2 h3; do
            on $h \"setsid {firn} agent --listen 127.0.0.1:0 --partner-size 16M $FIRN_PREFIX </dev/null >/dev/null 2>&1 &
                echo \\$! > {shared}/agent.$h\"
        done
        on h2 \"mkdir $FIRN_PREFIX/step_1; head -c 3000000 /dev/zero | tr '\\0' 2 > $FIRN_PREFIX/step_1/of.h2; {firn} wait -q --until partnered $FIRN_PREFIX/step_1\" || exit
        echo > {ready}; until test -e {go}; do sleep 0.05; done",
        firn = firn.display(),
        shared = hosts.sandbox.join("shared").display(),
        ready = ready.display(),
        go = go.display()
    );
    let options = ["--host-timeout", "5", "-o", "drain=demand,partner=next"];
    let mut command = hosts.firn_run(&options, &script);
    let log = hosts.sandbox.join("messages");
    command.stderr(fs::File::create(&log).expect("a file"));
    let mut child = command.spawn().expect("firn run");
    let told = || fs::read_to_string(&log).expect("messages");
    wait_until("the partner has a copy", LIMIT, || {
        ready.exists() || child.try_wait().expect("wait").is_some()
    });
    assert!(ready.exists(), "{}", told());
    assert_ne!(hosts.read("step_1/of.h2").len(), 3_000_000, "it is held");
    hosts.crash("h2");
    wait_until("the host is missed", LIMIT, || {
        told().contains("h2 does not answer any more")
    });
    fs::write(&go, "").expect("go");
    let status = wait_child(&mut child, LIMIT).expect("it ends");
    assert_eq!(exit_code(status), 1, "{}", told());
    assert!(
        told().contains("--restart h2 at the next run"),
        "{}",
        told()
    );
    hosts.holders.retain(|(name, _)| name != "h2");
    let read = "for h in h1 h3; do on $h \"cksum < $FIRN_PREFIX/step_1/of.h2\"; done";
    let options = ["--restart", "h2", "-o", "partner=next"];
    let outcome = run(&mut hosts.firn_run(&options, read)).ok();
    let expected =
        run(Command::new("sh").args(["-c", "head -c 3000000 /dev/zero | tr '\\0' 2 | cksum"]));
    assert_eq!(outcome.stdout, expected.ok().stdout.repeat(2), "{outcome}");
    assert_eq!(hosts.read("step_1/of.h2"), "2".repeat(3_000_000));
    for host in ["h1", "h3"] {
        let end = format!(
            "kill $(cat {}/agent.{host})",
            hosts.sandbox.join("shared").display()
        );
        run(Command::new(hosts.sandbox.join("shell")).args([host, &end]));
    }
    hosts.assert_nothing_left();
}

/// Proves S-share-7: on machines with kernels of their own, of which one loses firnd, one is started again, and one does not
/// come back.
#[test]
fn hosts_that_are_gone_are_told_as_they_are_and_leave_the_list_when_told_to() {
    let mut hosts = Hosts::with("hostgone", 4, true);
    let firn = firn_binary().display().to_string();
    let backing = hosts.sandbox.mkdir("shared/backing");
    let backing = backing.display().to_string();
    let point = hosts.sandbox.mkdir("mnt").display().to_string();
    for host in ["h1", "h2", "h3", "h4"] {
        let options = "arena-size=32M,layout=log,close=held,drain=demand";
        let line = format!(
            "{firn} mount -o {options} {backing} {point} && head -c 1048576 /dev/zero > {point}/{host}"
        );
        hosts.on(host, &line).ok();
    }
    for host in ["h1", "h2", "h3", "h4"] {
        wait_until("a host has said what it holds", LIMIT, || {
            hosts.seen(host)["report"]["held_bytes"] == 1 << 20
        });
    }
    let space = fs::read_link(format!("/proc/{}/ns/pid", hosts.first_process("h2")));
    let firnd = processes_in(&space.expect("its namespace"));
    let is_firnd = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.trim() == "firnd"
    };
    let firnd: Vec<u32> = firnd.into_iter().filter(is_firnd).collect();
    assert_eq!(firnd.len(), 1, "{firnd:?}");
    kill(firnd[0], libc::SIGKILL);
    hosts.crash("h3");
    hosts.crash("h4");
    for host in ["h2", "h3", "h4"] {
        let mut states = Vec::new();
        wait_until("a host is dead", LIMIT, || {
            states.push(hosts.seen(host)["state"].to_string());
            states.last().is_some_and(|state| state == "\"dead\"")
        });
        // The lock of h1, which lives, shows that free locks are believed.
        assert!(
            states
                .iter()
                .all(|state| state == "\"alive\"" || state == "\"dead\""),
            "{host}: {states:?}"
        );
    }
    let evidence = hosts.seen("h2")["evidence"].to_string();
    assert!(
        evidence.contains("last heartbeat") && evidence.contains(" ago"),
        "{evidence}"
    );
    let recover = format!("{firn} recover {backing}");
    let told = hosts.on("h2", &recover).ok();
    assert!(told.stdout.contains("recovered 1.0 MiB"), "{told}");
    assert_eq!(hosts.seen("h2")["state"], "left");

    hosts.start_again("h3");
    let seen = hosts.on("h3", &format!("{firn} hosts {backing}")).ok();
    assert!(
        seen.stdout.contains("this host was rebooted since"),
        "{seen}"
    );
    let told = hosts.on("h3", &recover).ok();
    assert!(
        told.stdout.contains("1.0 MiB that it held are lost"),
        "{told}"
    );
    assert_eq!(hosts.seen("h3")["state"], "left");

    let gone = |host: &str| hosts.sandbox.run(["recover", "--host", host, &backing]);
    gone("h1").code(11).says("h1");
    gone("h4")
        .ok()
        .says("1.0 MiB that it held at its last heartbeat are lost");
    assert_eq!(hosts.seen("h4")["state"], "left");
    hosts.on("h1", &format!("{firn} umount {point}")).ok();
    hosts.on("h2", &format!("umount {point}"));
    for host in ["h1", "h2"] {
        assert_eq!(hosts.read(host).len(), 1 << 20, "{host}");
    }
}

/// How long 64 hosts take to have a mount each, and to have none any more. Printed, not judged.
#[test]
fn many_hosts_mount_at_once() {
    let count = firn_tests::random::env_count("FIRN_RUN_HOSTS", 8) as usize;
    let mut hosts = Hosts::new("manyhosts", count);
    let begun = Instant::now();
    let outcome = run(&mut hosts.firn_run(&[], "date +%s.%N")).ok();
    let whole = begun.elapsed();
    let now: f64 = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("a time")
        .as_secs_f64();
    let command: f64 = outcome.stdout.trim().parse().expect("a time");
    let after = now - command;
    println!(
        "{count} hosts: mounted after {:.2} s, unmounted {after:.2} s later",
        whole.as_secs_f64() - after
    );
    assert!(
        outcome
            .stderr
            .contains(&format!("everything of {count} hosts is durable in ")),
        "{outcome}"
    );
    hosts.assert_nothing_left();
}

/// A log, or the record of a mount, which stay for `firn report`; copies of files of a host that was lost.
fn is_kept(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("log" | "record" | "events" | "partner"))
}
