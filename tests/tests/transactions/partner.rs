//! Partner copies: several firnd over one backing, each with an agent, and hosts that are lost with their arenas.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use firn_protocol::PartnerStatus;
use firn_tests::agent::Agent;
use firn_tests::command::{Outcome, run, wait_until};
use firn_tests::fsops::{assert_same_bytes, read};
use firn_tests::random::{bytes, env_count, generator};
use firn_tests::stop::StopAtEnd;
use firn_tests::{FirnMount, Sandbox, seed};
use rand::RngExt;

const MIB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const OPTIONS: &str = "arena-size=64M,chunk-size=1M,passthrough=off";

/// Hosts that share a backing. Their network is one.
struct Cluster {
    shared: Sandbox,
    hosts: Vec<Sandbox>,
}

/// A host with its mount and its agent.
struct Host<'a> {
    sandbox: &'a Sandbox,
    mount: FirnMount<'a>,
    agent: Agent,
}

impl Cluster {
    fn new(name: &str, hosts: usize) -> Self {
        let host = |at| Sandbox::new(&format!("{name}{at}"));
        Self {
            shared: Sandbox::new(name),
            hosts: (0..hosts).map(host).collect(),
        }
    }

    fn backing(&self) -> PathBuf {
        self.shared.join("backing")
    }

    fn mount(&self, at: usize, options: &str) -> FirnMount<'_> {
        let drain = if options.contains("drain=") {
            ""
        } else {
            "drain=demand,"
        };
        let options = format!("{OPTIONS},{drain}host=n{at},{options}");
        FirnMount::over(&self.hosts[at], &self.backing(), &options)
    }

    fn host(&self, at: usize, options: &str, agent: &[&str]) -> Host<'_> {
        let sandbox = &self.hosts[at];
        let mount = self.mount(at, options);
        let agent = Agent::start_unnamed(sandbox, mount.path(), agent);
        Host {
            sandbox,
            mount,
            agent,
        }
    }

    fn hosts(&self, options: &str) -> Vec<Host<'_>> {
        let all = 0..self.hosts.len();
        all.map(|at| self.host(at, options, &[])).collect()
    }

    /// What host `at` keeps for others.
    fn copies_dir(&self, at: usize) -> Option<PathBuf> {
        let runtime = fs::read_dir(self.hosts[at].runtime()).expect("the runtime directory");
        let mut paths = runtime.map(|entry| entry.expect("an entry").path());
        paths.find(|path| path.extension().is_some_and(|end| end == "partner"))
    }

    /// The files of all whole copies that host `at` keeps.
    fn copied_files(&self, at: usize) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for host in self
            .copies_dir(at)
            .into_iter()
            .flat_map(|dir| paths_in(&dir))
        {
            let whole = |path: &PathBuf| !is_hidden(path);
            for copy in paths_in(&host).into_iter().filter(whole) {
                add_files(&copy.join("tree"), &mut files);
            }
        }
        files
    }

    /// The hosts of which host `at` keeps whole copies.
    fn sources(&self, at: usize) -> Vec<String> {
        let dirs = self
            .copies_dir(at)
            .into_iter()
            .flat_map(|dir| paths_in(&dir));
        let is_whole = |copy: &PathBuf| !is_hidden(copy) && copy.join("tree").exists();
        let with_copies = dirs.filter(|dir| paths_in(dir).iter().any(is_whole));
        let name = |dir: PathBuf| {
            let name = dir.file_name().expect("a name");
            name.to_string_lossy().into_owned()
        };
        let mut sources: Vec<String> = with_copies.map(name).collect();
        sources.sort();
        sources
    }

    fn has_copies_of(&self, host: &str) -> bool {
        (0..self.hosts.len()).any(|at| self.sources(at).iter().any(|source| source == host))
    }

    fn copied_bytes(&self, at: usize) -> u64 {
        self.copies_dir(at).map_or(0, |dir| bytes_below(&dir))
    }

    fn pull(&self, from: &str, source: &str, target: &Path) -> Outcome {
        let mut pull = self.shared.firn(["pull", "--backing"]);
        pull.arg(self.backing()).arg(format!("{from}:{source}"));
        run(pull.arg(target))
    }
}

/// Whether it is a copy in the making, or one that is being removed.
fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(b".")
}

/// What vanishes meanwhile is left out.
fn paths_in(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

fn add_files(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_file() {
        return files.push(path.to_owned());
    }
    for path in paths_in(path) {
        add_files(&path, files);
    }
}

fn state_of(path: &Path) -> String {
    let mut state = vec![0; 16];
    let found = rustix::fs::getxattr(path, "user.firn.state", &mut state);
    state.truncate(found.expect("the state"));
    String::from_utf8(state).expect("a word")
}

fn bytes_below(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries
        .map(|entry| {
            let path = entry.expect("an entry").path();
            match path.symlink_metadata() {
                Ok(found) if found.is_dir() => bytes_below(&path),
                Ok(found) => found.len(),
                // It was renamed or removed.
                Err(_) => 0,
            }
        })
        .sum()
}

impl Host<'_> {
    fn partner(&self) -> PartnerStatus {
        self.mount.status().partner.expect("it wants a partner")
    }

    #[track_caller]
    fn wait_for_partner(&self, name: &str) {
        self.wait_for_one_of(&[name]);
    }

    #[track_caller]
    fn wait_for_one_of(&self, names: &[&str]) {
        wait_until(&format!("the partner is one of {names:?}"), LIMIT, || {
            let partner = self.partner().host;
            partner.is_some_and(|host| names.contains(&&*host))
        });
    }

    /// A checkpoint of several files in directories, all closed.
    fn write(&self, name: &str, key: u64) -> PathBuf {
        let top = self.mount.join(name);
        fs::create_dir_all(top.join("a/b")).expect("mkdir");
        for (path, len) in [("rank0", 3 * MIB + 17), ("a/rank1", MIB), ("a/b/rank2", 5)] {
            fs::write(top.join(path), bytes(key + len as u64, len)).expect("write");
        }
        fs::set_permissions(top.join("rank0"), PermissionsExt::from_mode(0o640)).expect("chmod");
        top
    }

    fn wait(&self, path: &Path, until: &str, timeout: &str) -> Outcome {
        let mut wait = self
            .sandbox
            .firn(["wait", "--until", until, "--timeout", timeout]);
        run(wait.arg(path))
    }

    /// The host fails: its processes and its memory are gone.
    fn lose(self) {
        let arena = self.sandbox.arena();
        self.agent.kill();
        self.mount.kill();
        fs::remove_file(arena).expect("the arena");
    }
}

/// Ends the agent of a host and starts another one.
fn begin_anew(host: Host<'_>) -> Host<'_> {
    let Host {
        sandbox,
        mount,
        agent,
    } = host;
    assert_eq!(agent.end(), Some(0));
    let agent = Agent::start_unnamed(sandbox, mount.path(), &[]);
    Host {
        sandbox,
        mount,
        agent,
    }
}

const FILES: [&str; 3] = ["rank0", "a/rank1", "a/b/rank2"];

fn contents(top: &Path) -> Vec<(Vec<u8>, i64, u32)> {
    let of = |name: &&str| {
        let path = top.join(name);
        let found = path.metadata().expect("metadata");
        (read(&path), found.mtime(), found.mode())
    };
    FILES.iter().map(of).collect()
}

/// Proves S-partner-1, S-partner-2, S-partner-5: a host is lost with its arena.
#[test]
fn a_checkpoint_survives_its_host_in_the_memory_of_the_partner() {
    let cluster = Cluster::new("partner-loss", 3);
    let mut hosts = cluster.hosts("partner=next");
    hosts[0].wait_for_partner("n1");
    hosts[2].wait_for_partner("n0");
    let top = hosts[0].write("step_1", 7);
    hosts[0].wait(&top, "partnered", "60s").ok();
    let status = hosts[0].partner();
    assert_eq!(
        (status.left_files, status.copied_files),
        (0, 3),
        "{status:?}"
    );
    assert_eq!(status.lag_seconds, 0.0);
    let mut ls = hosts[0].sandbox.firn(["ls", "--state", "partnered"]);
    let listed = run(ls.arg(&top)).ok();
    assert_eq!(listed.stdout.lines().count(), FILES.len(), "{listed}");
    let before = contents(&top);
    hosts.remove(0).lose();
    let target = cluster.shared.join("copy");
    cluster.pull("n1", "n0/step_1", &target).ok();
    assert_eq!(contents(&target), before);
    // What another host holds is not touched by it, and what never was cannot be pulled.
    cluster
        .pull("n1", "n0/step_2", &cluster.shared.join("none"))
        .code(1)
        .says("no partner copy");
    cluster
        .pull("n2", "n0/step_1", &cluster.shared.join("none"))
        .code(1)
        .says("no partner copy");
}

/// Proves S-partner-3: `partnered` is of the bytes as they are.
#[test]
fn a_file_that_changes_is_partnered_again_once_it_is_copied_again() {
    let cluster = Cluster::new("partner-change", 2);
    let hosts = cluster.hosts("partner=next");
    let top = hosts[0].write("step_1", 1);
    hosts[0].wait(&top, "partnered", "60s").ok();
    let path = top.join("rank0");
    assert_eq!(state_of(&path), "partnered");
    // It is not as long as it is open for writing: more may be written at any time.
    let open = fs::File::options().write(true).open(&path).expect("open");
    assert_eq!(state_of(&path), "held");
    hosts[0]
        .wait(&path, "partnered", "1s")
        .code(3)
        .says("open for writing");
    drop(open);
    let rand = &mut generator(seed("partner-change"));
    for round in 0..5 {
        let mut data = read(&path);
        let at = rand.random_range(0..data.len());
        data[at] ^= 1;
        fs::write(&path, &data).expect("write");
        hosts[0].wait(&top, "partnered", "60s").ok();
        let target = cluster.shared.join(format!("copy{round}"));
        cluster.pull("n1", "n0/step_1", &target).ok();
        assert_same_bytes("the copy", &read(&target.join("rank0")), &data);
    }
}

/// Proves S-partner-4: drained or removed at the source, gone at the partner.
#[test]
fn a_copy_goes_when_its_source_does_not_hold_it_any_more() {
    let cluster = Cluster::new("partner-drain", 2);
    let hosts = cluster.hosts("partner=next");
    let one = hosts[0].write("step_1", 1);
    let two = hosts[0].write("step_2", 2);
    hosts[0]
        .wait(hosts[0].mount.path(), "partnered", "60s")
        .ok();
    assert!(cluster.copied_bytes(1) > 8 * MIB as u64);
    hosts[0].wait(&one, "drained", "60s").ok();
    wait_until("the drained copy is gone", LIMIT, || {
        cluster.copied_bytes(1) < 5 * MIB as u64
    });
    cluster
        .pull("n1", "n0/step_1", &cluster.shared.join("none"))
        .code(1);
    cluster
        .pull("n1", "n0/step_2", &cluster.shared.join("copy"))
        .ok();
    fs::remove_dir_all(&two).expect("remove");
    wait_until("the removed copy is gone", LIMIT, || {
        cluster.copied_bytes(1) == 0
    });
    assert_eq!(cluster.copies_dir(1), None, "nothing of it stays");
}

/// Proves S-partner-4: an arena that is lost is not one that was drained.
#[test]
fn copies_of_a_lost_arena_stay_until_the_backing_has_them() {
    let cluster = Cluster::new("partner-orphan", 2);
    let mut hosts = cluster.hosts("partner=next");
    let top = hosts[0].write("step_1", 3);
    hosts[0].wait(&top, "partnered", "60s").ok();
    let before = contents(&top);
    hosts.remove(0).lose();
    // The host is back, with an empty arena, and its partner follows it again.
    let again = cluster.host(0, "partner=next", &[]);
    again.wait_for_partner("n1");
    // What it writes under the same name does not push out what is nowhere else.
    fs::create_dir_all(&top).expect("mkdir");
    fs::write(top.join("newer"), b"newer").expect("write");
    wait_until("it is told", LIMIT, || {
        again
            .partner()
            .note
            .contains("from before n0 lost its memory")
    });
    let other = again.write("step_2", 4);
    again.wait(&other, "partnered", "60s").ok();
    let target = cluster.shared.join("copy");
    cluster.pull("n1", "n0/step_1", &target).ok();
    assert_eq!(contents(&target), before);
    // The partner's agent ends, and one more begins and ends: what is not in the backing stays.
    let n1 = hosts.remove(0);
    let mount = n1.mount;
    assert_eq!(n1.agent.end(), Some(0));
    assert!(cluster.copied_bytes(1) > 0);
    for name in FILES {
        fs::write(top.join(name), read(&target.join(name))).expect("restore");
    }
    let drain = again.sandbox.run([
        "drain".as_ref(),
        "--wait".as_ref(),
        again.mount.path().as_os_str(),
    ]);
    drain.ok();
    let agent = Agent::start_unnamed(n1.sandbox, mount.path(), &[]);
    assert_eq!(agent.end(), Some(0));
    assert_eq!(cluster.copied_bytes(1), 0, "the backing has all of it");
}

/// Proves S-partner-6: a partner that is gone is not waited for.
#[test]
fn without_its_partner_a_file_is_held_again_and_another_host_takes_over() {
    let cluster = Cluster::new("partner-dies", 3);
    let mut hosts = cluster.hosts("partner=next");
    hosts[0].wait_for_partner("n1");
    let top = hosts[0].write("step_1", 1);
    hosts[0].wait(&top, "partnered", "60s").ok();
    hosts.remove(1).lose();
    hosts[0].wait_for_partner("n2");
    hosts[0].wait(&top, "partnered", "60s").ok();
    cluster
        .pull("n2", "n0/step_1", &cluster.shared.join("copy"))
        .ok();
    // No host is left.
    hosts.remove(1).lose();
    wait_until("there is no partner", LIMIT, || {
        hosts[0].partner().host.is_none()
    });
    let before = contents(&top);
    let next = hosts[0].write("step_2", 2);
    for path in [&top, &next] {
        hosts[0]
            .wait(path, "partnered", "1s")
            .code(3)
            .says("there is no partner");
    }
    assert_eq!(contents(&top), before);
    let status = hosts[0]
        .sandbox
        .run(["status".as_ref(), hosts[0].mount.path().as_os_str()]);
    let status = status.ok();
    assert!(status.stdout.contains("lost if this host is"), "{status}");
    // Its agent ends, too.
    let Host { mount, agent, .. } = hosts.remove(0);
    agent.kill();
    wait_until("nobody speaks of the partner", LIMIT, || {
        let partner = mount.status().partner.expect("it wants one");
        partner.note.contains("no `firn agent` runs")
    });
}

/// Calls a host by its number.
fn name_of(at: usize) -> String {
    format!("n{}", at % 5)
}

/// Waits until each of five hosts is the partner of the one before it, and has its copies and no others.
#[track_caller]
fn wait_for_ring(cluster: &Cluster, hosts: &[Host<'_>]) {
    for (at, host) in hosts.iter().enumerate() {
        host.wait_for_partner(&name_of(at + 1));
        let before = name_of(at + 4);
        wait_until(
            &format!("n{at} keeps the copies of {before} only"),
            LIMIT,
            || cluster.sources(at) == [before.as_str()],
        );
    }
}

/// Proves S-partner-13: hosts that come one after the other, one that goes, and one that comes back. Once there are copies
/// of what a host holds, there are some at every moment.
#[test]
fn regression_each_host_keeps_the_copies_of_one_other() {
    let cluster = Cluster::new("partner-ring", 5);
    let copied = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = StopAtEnd(&stop);
        let watcher = scope.spawn(|| {
            let mut looks = 0;
            while !stop.load(Ordering::Acquire) {
                for at in 0..copied.load(Ordering::Acquire) {
                    // One look may miss a copy that is exchanged for another one on another host meanwhile.
                    let has_copies = || cluster.has_copies_of(&name_of(at));
                    assert!(has_copies() || has_copies() || has_copies(), "n{at}");
                }
                looks += 1;
            }
            looks
        });
        let mut hosts: Vec<Host<'_>> = Vec::new();
        for at in 0..5 {
            hosts.push(cluster.host(at, "partner=next", &[]));
            let top = hosts[at].write("step_1", at as u64);
            if at > 0 {
                hosts[0]
                    .wait(&hosts[0].mount.join("step_1"), "partnered", "60s")
                    .ok();
                hosts[at].wait(&top, "partnered", "60s").ok();
                copied.store(at + 1, Ordering::Release);
            }
        }
        wait_for_ring(&cluster, &hosts);

        let Host {
            sandbox,
            mount,
            agent,
        } = hosts.remove(2);
        assert_eq!(agent.end(), Some(0));
        hosts[1].wait_for_partner("n3");
        wait_until("n3 keeps what n1 holds, and what n2 held", LIMIT, || {
            cluster.sources(3) == ["n1", "n2"]
        });
        hosts[1]
            .wait(&hosts[1].mount.join("step_1"), "partnered", "60s")
            .ok();

        let agent = Agent::start_unnamed(sandbox, mount.path(), &[]);
        let back = Host {
            sandbox,
            mount,
            agent,
        };
        hosts.insert(2, back);
        wait_for_ring(&cluster, &hosts);
        for host in &hosts {
            let top = host.mount.join("step_1");
            host.wait(&top, "partnered", "60s").ok();
        }
        drop(ended);
        let looks: u64 = watcher.join().expect("copies at every moment");
        assert!(looks > 10, "{looks} looks");
    });
}

/// Proves S-partner-1: a record that leads to an agent of another name makes that one a former, which is chosen next.
#[test]
fn regression_a_former_that_is_chosen_is_a_partner_whose_marks_count() {
    let cluster = Cluster::new("partner-former", 2);
    // It wants none itself.
    let _partner = cluster.host(1, "tokens=flock", &["--host", "n1"]);
    let record = |host: &str| cluster.backing().join(format!(".firn/agent-{host}"));
    // It comes before n1 in the order of n0.
    fs::copy(record("n1"), record("n0a")).expect("copy the record");
    let source = cluster.host(0, "partner=next", &[]);
    let top = source.write("step_1", 1);
    wait_until("it does not come", LIMIT, || {
        source
            .agent
            .log()
            .contains("the partner of this host is n1")
    });
    source.wait(&top, "partnered", "60s").ok();
    assert_eq!(source.partner().host.as_deref(), Some("n1"));
}

/// Proves S-partner-3: an agent that begins anew, on either side, and a firnd that does.
#[test]
fn copies_are_found_again_after_agents_and_firnd_were_killed() {
    let cluster = Cluster::new("partner-kills", 2);
    let mut hosts = cluster.hosts("partner=next");
    let top = hosts[0].write("step_1", 5);
    hosts[0].wait(&top, "partnered", "60s").ok();
    for at in [0, 1] {
        let Host {
            sandbox,
            mount,
            agent,
        } = hosts.remove(at);
        agent.kill();
        let agent = Agent::start_unnamed(sandbox, mount.path(), &[]);
        hosts.insert(
            at,
            Host {
                sandbox,
                mount,
                agent,
            },
        );
        hosts[0].wait(&top, "partnered", "60s").ok();
    }
    let before = contents(&top);
    let inodes = |cluster: &Cluster| {
        let mut files: Vec<_> = cluster.copied_files(1);
        files.sort();
        let of = |path: &PathBuf| path.metadata().expect("metadata").ino();
        files.iter().map(of).collect::<Vec<_>>()
    };
    // Its copies count again and are not made again; one that is not the same is.
    for is_damaged in [false, true] {
        let copied = inodes(&cluster);
        let files = cluster.copied_files(1);
        let damaged = files.iter().find(|path| path.ends_with("a/rank1"));
        let damaged = damaged.expect("a copy of a/rank1");
        if is_damaged {
            let file = fs::File::options().write(true).open(damaged);
            file.expect("open").write_all_at(b"?", 77).expect("write");
        }
        let Host {
            sandbox,
            mount,
            agent,
        } = hosts.remove(0);
        mount.kill();
        let mount = cluster.mount(0, "partner=next");
        hosts.insert(
            0,
            Host {
                sandbox,
                mount,
                agent,
            },
        );
        hosts[0].wait(&top, "partnered", "60s").ok();
        assert_eq!(contents(&top), before);
        assert_eq!(inodes(&cluster) != copied, is_damaged);
        let target = cluster.shared.join(format!("copy{is_damaged}"));
        cluster.pull("n1", "n0/step_1", &target).ok();
        assert_eq!(contents(&target), before);
    }
    // Written to without a follower.
    let Host {
        sandbox,
        mount,
        agent,
    } = hosts.remove(0);
    agent.kill();
    mount.kill();
    let mount = cluster.mount(0, "partner=next");
    let other = bytes(99, MIB);
    fs::write(top.join("a/rank1"), &other).expect("write");
    let agent = Agent::start_unnamed(sandbox, mount.path(), &[]);
    let host = Host {
        sandbox,
        mount,
        agent,
    };
    host.wait(&top, "partnered", "60s").ok();
    let target = cluster.shared.join("newer");
    cluster.pull("n1", "n0/step_1", &target).ok();
    assert_same_bytes("the newer one", &read(&target.join("a/rank1")), &other);
}

/// Proves S-partner-7.
#[test]
fn a_partner_without_room_keeps_what_it_has_and_says_so() {
    let cluster = Cluster::new("partner-full", 2);
    let source = cluster.host(0, "partner=next", &[]);
    // It wants none itself.
    let partner = cluster.host(1, "tokens=flock", &["--host", "n1", "--partner-size", "6M"]);
    source.wait_for_partner("n1");
    let one = source.write("step_1", 1);
    source.wait(&one, "partnered", "60s").ok();
    let two = source.write("step_2", 2);
    wait_until("it is told", LIMIT, || {
        source.partner().note.contains("has no room")
    });
    source
        .wait(&two, "partnered", "1s")
        .code(3)
        .says("has no room");
    assert!(cluster.copied_bytes(1) < 6 * MIB as u64);
    source.wait(&one, "partnered", "1s").ok();
    cluster
        .pull("n1", "n0/step_1", &cluster.shared.join("copy"))
        .ok();
    source.wait(&one, "drained", "60s").ok();
    source.wait(&two, "partnered", "60s").ok();
    drop(partner);
}

/// Proves S-partner-8: a planted record, in the ring and as the host that asks.
#[test]
fn a_strangers_record_is_not_believed() {
    let cluster = Cluster::new("partner-strangers", 2);
    let backing = cluster.backing();
    let mount = cluster.mount(0, "partner=next");
    let agent = Agent::start_unnamed(&cluster.hosts[0], mount.path(), &[]);
    let record = |host: &str| backing.join(format!(".firn/agent-{host}"));
    let text = fs::read(record("n0")).expect("a record");
    // n1 to n3 would come first: readable by others, another user's, a link.
    fs::write(record("n01"), &text).expect("write");
    fs::set_permissions(record("n01"), PermissionsExt::from_mode(0o644)).expect("chmod");
    fs::write(record("n02"), &text).expect("write");
    fs::set_permissions(record("n02"), PermissionsExt::from_mode(0o600)).expect("chmod");
    std::os::unix::fs::chown(record("n02"), Some(65_534), None).expect("chown");
    std::os::unix::fs::symlink(record("n0"), record("n03")).expect("symlink");
    fs::write(record("n04"), b"garbage").expect("write");
    fs::set_permissions(record("n04"), PermissionsExt::from_mode(0o600)).expect("chmod");
    let host = Host {
        sandbox: &cluster.hosts[0],
        mount,
        agent,
    };
    let second = cluster.host(1, "partner=next", &[]);
    host.wait_for_partner("n1");
    second.wait_for_partner("n0");
    for name in ["n01", "n02", "n03", "n04"] {
        wait_until(&format!("{name} is skipped as partner"), LIMIT, || {
            let said = |agent: &Agent| {
                agent
                    .log()
                    .contains(&format!("{name} is skipped as partner"))
            };
            said(&host.agent) || said(&second.agent)
        });
    }
}

/// Proves S-partner-9: racks, and files of them that are wrong.
#[test]
fn the_partner_is_in_another_failure_domain_where_there_is_one() {
    let cluster = Cluster::new("partner-domains", 3);
    let domains = cluster.shared.join("domains");
    fs::write(&domains, "# two racks\nn[01] rack1\nn2 rack2\n").expect("write");
    let options = format!("partner=next,partner-domains={}", domains.display());
    let mut hosts = cluster.hosts(&options);
    // Those in the first rack may have looked before the second one was there.
    let last = hosts.pop().expect("three");
    let hosts: Vec<_> = hosts.into_iter().map(begin_anew).collect();
    hosts[0].wait_for_partner("n2");
    hosts[1].wait_for_partner("n2");
    // Both are in another domain, and n0 was away for a moment.
    last.wait_for_one_of(&["n0", "n1"]);
    last.lose();
    hosts[0].wait_for_partner("n1");
    wait_until("it is told", LIMIT, || {
        hosts[0].partner().note.contains("same failure domain")
    });
    drop(hosts);
    for (text, told) in [("n0 rack 1\n", "line 1"), ("a b\nn[ rack\n", "line 2")] {
        fs::write(&domains, text).expect("write");
        let mount = cluster.mount(0, &options);
        let mut agent = cluster.hosts[0].firn(["agent", "--listen", "127.0.0.1:0"]);
        run(agent.arg(mount.path()))
            .code(1)
            .says(told)
            .says("partner-domains");
    }
    fs::remove_file(&domains).expect("remove");
    let mount = cluster.mount(0, &options);
    let mut agent = cluster.hosts[0].firn(["agent", "--listen", "127.0.0.1:0"]);
    run(agent.arg(mount.path())).code(1).says("No such file");
    drop(mount);
    let mount = cluster.mount(0, "partner=n0");
    let mut agent = cluster.hosts[0].firn(["agent", "--listen", "127.0.0.1:0"]);
    run(agent.arg(mount.path()))
        .code(1)
        .says("names this host itself");
}

/// Proves S-partner-1: a checkpoint is copied once, when it is whole.
#[test]
fn nothing_is_copied_of_a_checkpoint_whose_next_file_is_open() {
    let cluster = Cluster::new("partner-open", 2);
    let hosts = cluster.hosts("partner=next");
    hosts[0].wait_for_partner("n1");
    let top = hosts[0].mount.join("step_1");
    fs::create_dir(&top).expect("mkdir");
    let next = fs::File::create(top.join("rank1")).expect("create");
    fs::write(top.join("rank0"), bytes(1, MIB)).expect("write");
    // Closed after rank0: once it is copied, the partner has looked at that as often.
    let beside = hosts[0].mount.join("beside");
    fs::write(&beside, b"beside").expect("write");
    hosts[0].wait(&beside, "partnered", "60s").ok();
    assert_eq!(cluster.copied_files(1).len(), 1);
    next.write_all_at(b"rank1", 0).expect("write");
    drop(next);
    hosts[0].wait(&top, "partnered", "60s").ok();
    assert_eq!(cluster.copied_files(1).len(), 3);
}

/// Proves S-partner-11: what a transaction may take back is in no copy, at no moment.
#[test]
fn what_is_not_committed_is_not_copied() {
    let cluster = Cluster::new("partner-commit", 2);
    let partner = cluster.host(1, "tokens=flock", &["--host", "n1"]);
    // Files of less than a chunk stay in memory.
    let source = cluster.host(0, "drain=commit,drain-age=1h,partner=next", &[]);
    source.wait_for_partner("n1");
    let firn = |verb: &str, path: &Path| {
        let done = source.sandbox.run([verb.as_ref(), path.as_os_str()]);
        done.ok();
    };
    let top = source.mount.join("step");
    fs::create_dir(&top).expect("mkdir");
    let write = |path: &Path, byte: u8| fs::write(path, vec![byte; 200_000]).expect("write");
    write(&top.join("rank0"), b'c');
    source.wait(&top, "partnered", "60s").ok();
    firn("begin", &top);
    write(&top.join("rank0"), b'u');
    write(&top.join("rank1"), b'u');
    // After both were closed, the partner looks twice at least.
    let beside = source.mount.join("beside");
    write(&beside, b'c');
    source.wait(&beside, "partnered", "60s").ok();
    assert_eq!(state_of(&top.join("rank0")), "held");
    assert_eq!(state_of(&top.join("rank1")), "held");
    let none = cluster.pull("n1", "n0/step", &cluster.shared.join("none"));
    none.code(1).says("no partner copy");
    firn("abort", &top);

    let over = AtomicBool::new(false);
    let looked = std::thread::scope(|scope| {
        let ended = StopAtEnd(&over);
        let looker = scope.spawn(|| {
            let mut looked = 0;
            while !over.load(Ordering::Acquire) {
                for path in cluster.copied_files(1) {
                    let Ok(copy) = fs::read(&path) else { continue };
                    assert!(!copy.contains(&b'u'), "{}", path.display());
                    looked += 1;
                }
            }
            looked
        });
        let rand = &mut generator(seed("partner-commit"));
        let rounds = env_count("FIRN_PARTNER_ROUNDS", 30);
        for _ in 0..rounds {
            write(&top.join("rank0"), b'c');
            // Anywhere between the look that finds it and the end of its copy.
            std::thread::sleep(Duration::from_millis(rand.random_range(0..300)));
            firn("begin", &top);
            write(&top.join("rank0"), b'u');
            write(&top.join("rank2"), b'u');
            firn("abort", &top);
            source.mount.note_progress();
        }
        drop(ended);
        looker.join().expect("the looker")
    });
    assert!(looked > 0, "no copy was ever seen");
    firn("begin", &top);
    write(&top.join("rank0"), b'u');
    write(&beside, b'd');
    source.wait(&beside, "partnered", "60s").ok();
    source.lose();
    let copy = cluster.shared.join("copy");
    cluster.pull("n1", "n0/beside", &copy).ok();
    assert_eq!(read(&copy), vec![b'd'; 200_000]);
    let none = cluster.pull("n1", "n0/step", &cluster.shared.join("none"));
    none.code(1).says("no partner copy");
    drop(partner);
}

/// Proves S-partner-12.
#[test]
fn copies_are_encrypted_on_their_way_where_one_of_the_hosts_says_so() {
    for (name, wishes, is_encrypted) in [
        ("partner-plain", ["auto", "no"], Some(false)),
        ("partner-sealed1", ["yes", "auto"], Some(true)),
        ("partner-sealed2", ["auto", "yes"], Some(true)),
        ("partner-clash", ["no", "yes"], None),
    ] {
        let cluster = Cluster::new(name, 2);
        let start = |at: usize| {
            let agent = ["--verbose", "--encrypt", wishes[at]];
            cluster.host(at, "partner=next", &agent)
        };
        let source = start(0);
        let partner = start(1);
        let top = source.write("step_1", 4);
        let Some(is_encrypted) = is_encrypted else {
            wait_until("it is told", LIMIT, || {
                source.partner().note.contains("encrypt")
            });
            let refused = source.wait(&top, "partnered", "1s").code(3);
            refused.says("there is no partner");
            assert_eq!(cluster.copies_dir(1), None);
            continue;
        };
        source.wait(&top, "partnered", "60s").ok();
        let before = contents(&top);
        for log in [source.agent.log(), partner.agent.log()] {
            let connected = log.lines().filter(|line| line.contains(" is connected"));
            let how: Vec<_> = connected.map(|line| line.contains("encrypted")).collect();
            assert!(!how.is_empty(), "{log}");
            assert!(
                how.iter().all(|how| *how == is_encrypted),
                "{wishes:?}: {log}"
            );
        }
        source.lose();
        let target = cluster.shared.join("copy");
        cluster.pull("n1", "n0/step_1", &target).ok();
        assert_eq!(contents(&target), before);
    }
}

/// Without the option there is no partner, and waiting for one is refused at once.
#[test]
fn a_mount_without_the_option_has_no_partner() {
    let cluster = Cluster::new("partner-none", 1);
    let host = cluster.host(0, "tokens=flock", &[]);
    assert_eq!(host.mount.status().partner, None);
    host.wait(host.mount.path(), "partnered", "60s")
        .code(1)
        .says("partner=next");
}

/// Proves S-partner-10, S-partner-31.
#[test]
fn a_job_restarts_on_another_host_from_the_memory_of_the_partner() {
    let cluster = Cluster::new("partner-restart", 3);
    let mut hosts = cluster.hosts("partner=next");
    let first = hosts[0].write("step_1", 1);
    hosts[0]
        .wait(hosts[0].mount.path(), "partnered", "60s")
        .ok();
    let backed = hosts[0].write("step_0", 9);
    hosts[0].wait(&backed, "durable", "60s").ok();
    wait_until("one checkpoint is left to the partner", LIMIT, || {
        cluster.copied_bytes(1) < 5 * MIB as u64
    });
    let before = contents(&first);
    let old = contents(&backed);
    hosts.remove(0).lose();
    let replacement = hosts.pop().expect("three");
    assert_eq!(replacement.agent.end(), Some(0));
    replacement.mount.umount();
    let out = cluster.shared.mkdir("out");
    let job = |host: &str| {
        let args = ["run", "--no-preload", "--memory", "64M", "--restart", host];
        let mut job = cluster.hosts[2].firn(args);
        job.args(["-o", "partner=next"]);
        job.arg("--backing").arg(cluster.backing());
        job.arg("--prefix").arg(cluster.hosts[2].join("mnt"));
        job.args(["--", "sh", "-c", "cp -a \"$FIRN_PREFIX\"/step_* \"$0\""]);
        run(job.arg(&out))
    };
    job("n0")
        .ok()
        .says("restored 3 files")
        .says("from the memory of n1");
    assert_eq!(contents(&out.join("step_1")), before);
    assert_eq!(contents(&out.join("step_0")), old);
    // It was drained when the job had ended: the backing is nearer now.
    assert_eq!(contents(&cluster.backing().join("step_1")), before);
    assert!(!cluster.backing().join(".firn-restart").exists());
    job("n0")
        .ok()
        .says("restored 0 files")
        .says("3 files were here already");
    job("n9").ok().says("the data in the backing");
    // What was written since stays.
    let rank = cluster.backing().join("step_1/rank0");
    fs::write(&rank, b"newer").expect("write");
    job("n0").ok().says("it stays as it is");
    assert_eq!(read(&rank), b"newer");
    // A link that was put in the place of a directory is not followed.
    let step = cluster.backing().join("step_1");
    let aside = cluster.backing().join("aside");
    fs::rename(&step, &aside).expect("rename");
    fs::create_dir(cluster.backing().join("mine")).expect("mkdir");
    std::os::unix::fs::symlink("mine", &step).expect("symlink");
    job("n0").code(1).says("cannot restore");
    assert!(paths_in(&cluster.backing().join("mine")).is_empty());
    fs::remove_file(&step).expect("remove");
    fs::rename(&aside, &step).expect("rename");
    job("n0").ok();
    // The partner is lost, too: the command does not begin.
    hosts.remove(0).lose();
    job("n0").code(1).says("without --restart");
}
