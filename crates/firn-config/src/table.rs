//! The table of all options.
//!
//! A [`Row`] has everything about an option. Its `name` gives the flag `--name`, the key of `-o` and of the files, and
//! the variable `FIRN_NAME` with underscores. [`IMPLIED`] says which options set others, and [`CONTRADICTIONS`] which
//! values contradict each other.

use std::fmt;
use std::path::PathBuf;

use firn_format::quote::quoted_path;
use strum::{VariantArray, VariantNames};

use crate::options::{
    Close, Drain, Flatten, Frontend, Fsync, Layout, LogLevel, Mode, Options, Order, Participants,
    Partner, Passthrough, Placement, RecordPlace, Takeover, TokenService,
};
use crate::quantity::{duration_text, size_text};
use crate::value::{Kind, Value};

/// Everything about one option.
pub struct Row {
    /// Name of the option in every source.
    pub name: &'static str,
    /// How its value is written, and which values are allowed.
    pub kind: Kind,
    /// Default, as a user would write it. Empty: there is none.
    pub default: &'static str,
    /// Short help: one line, imperative, no full stop.
    pub help: &'static str,
    /// Long help: what a user must know to choose a value.
    pub long: &'static str,
    /// Whether the status of a mount shows the option, because it changes what the mount promises.
    pub changes_promises: bool,
    /// Returns the value in [`Options`] as a user would write it. Paths are quoted for readers (`firn_format::quote`).
    pub get: fn(&Options) -> String,
    /// Sets the value in [`Options`]. The value must be of `kind`.
    pub set: fn(&mut Options, Value),
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Row {
    /// Returns the name of the option's environment variable.
    pub fn env(&self) -> String {
        format!("FIRN_{}", self.name.replace('-', "_").to_uppercase())
    }
}

/// Other names of options, as flags and after `-o`: the alias, and the option's name.
pub const ALIASES: [(&str, &str); 1] = [("memory", "arena-size")];

/// Returns the option of this name or alias. Underscores count as hyphens.
pub fn row(name: &str) -> Option<&'static Row> {
    let name = name.replace('_', "-");
    let name = ALIASES
        .iter()
        .find(|(alias, _)| *alias == name)
        .map_or(name.as_str(), |(_, name)| name);
    TABLE.iter().find(|row| row.name == name)
}

/// All options, in the order of the help.
pub static TABLE: [Row; 53] = [
    Row {
        name: "arena-size",
        kind: Kind::Size {
            min: 1 << 20,
            max: 16 << 40,
            power_of_two: false,
        },
        default: "256M",
        help: "Memory for data that is not in the backing yet",
        long: "If memory allows, choose the size of one checkpoint of this host. Choose at least a few chunks for each \
               I/O thread, and two for each file that is written at the same time. The size cannot change while the \
               arena holds data.",
        changes_promises: false,
        get: |options| size_text(options.arena_bytes),
        set: |options, value| options.arena_bytes = value.number(),
    },
    Row {
        name: "chunk-size",
        kind: Kind::Size {
            min: 64 << 10,
            max: 1 << 30,
            power_of_two: true,
        },
        default: "4M",
        help: "Unit in which data is collected and written",
        long: "Choose larger chunks where each write is expensive, as on a network file system, and smaller ones for a \
               small arena or very many small files.",
        changes_promises: false,
        get: |options| size_text(options.chunk_bytes),
        set: |options, value| options.chunk_bytes = value.number(),
    },
    Row {
        name: "io-threads",
        kind: Kind::Count {
            min: 1,
            max: 256,
            zero: None,
        },
        default: "4",
        help: "Threads that write to the backing in parallel",
        long: "Choose more where the backing has a long latency and serves many requests in parallel, and few for a \
               disk or a server that many hosts share. With `placement`, choose at least one for each lane.",
        changes_promises: false,
        get: |options| options.io_threads.to_string(),
        set: |options, value| options.io_threads = value.number() as u32,
    },
    Row {
        name: "order",
        kind: Kind::Choice(words::<Order>()),
        default: "interleaved",
        help: "Order in which the files of one I/O server are written",
        long: "`interleaved`: each file with data gets one write in turn. `sequential`: one file is written after the \
               other, which saves time on a seeking disk but not on flash. With several hosts, set `tokens` too.",
        changes_promises: true,
        get: |options| word(options.order),
        set: |options, value| options.order = value.choice(),
    },
    Row {
        name: "lane-writers",
        kind: Kind::Count {
            min: 0,
            max: 256,
            zero: Some("all"),
        },
        default: "all",
        help: "Largest number of writes that one I/O server gets at once; all: one for each I/O thread",
        long: "Choose `1` for a server with one disk, more for one that needs several requests to be busy. Without \
               lanes, the number is for the whole backing.",
        changes_promises: false,
        get: |options| match options.lane_writers {
            0 => "all".into(),
            count => count.to_string(),
        },
        set: |options, value| options.lane_writers = value.number() as u32,
    },
    Row {
        name: "frontend",
        kind: Kind::Choice(words::<Frontend>()),
        default: "fuse",
        help: "How programs reach the files: a FUSE mount, or the preload library alone",
        long: "`preload`: the mount point is a tree of empty files on tmpfs. Only dynamically linked programs of the \
               mounting user with the preload library (LD_PRELOAD) reach the data.",
        changes_promises: true,
        get: |options| word(options.frontend),
        set: |options, value| options.frontend = value.choice(),
    },
    Row {
        name: "drain",
        kind: Kind::Choice(words::<Drain>()),
        default: "eager",
        help: "When data goes to the backing: as it arrives (eager), on request (demand), or with a commit \
               (commit)",
        long: "`demand`: files remain in memory until `firn drain`, fsync or `firn umount`, and are lost if the host \
               fails before. When they fill memory, writes fail with ENOSPC. `commit`: the mount has transactions \
               (`firn begin`, `firn commit`, `firn abort`); outside of them it drains like `eager`.",
        changes_promises: true,
        get: |options| word(options.drain),
        set: |options, value| options.drain = value.choice(),
    },
    Row {
        name: "history",
        kind: Kind::Count {
            min: 0,
            max: 1000,
            zero: Some("off"),
        },
        default: "off",
        help: "Number of older commits that `firn restore` can bring back",
        long: "Each commit copies what it overwrites, and moves what it removes, to `.firn/` in the backing. On btrfs \
               and xfs, whose files can share blocks, copies take no space.",
        changes_promises: true,
        get: |options| {
            if options.history == 0 {
                "off".to_owned()
            } else {
                options.history.to_string()
            }
        },
        set: |options, value| options.history = value.number() as u32,
    },
    Row {
        name: "mode",
        kind: Kind::Choice(words::<Mode>()),
        default: "buffer",
        help: "With drain=commit: hold changes back until the commit (buffer), or write them at once and undo \
               them on abort (shadow)",
        long: "Choose `shadow` if processes on other hosts read changes before the commit. All `participants` must use \
               the same mode.",
        changes_promises: true,
        get: |options| word(options.mode),
        set: |options, value| options.mode = value.choice(),
    },
    Row {
        name: "placement",
        kind: Kind::Choice(words::<Placement>()),
        default: "none",
        help: "What chooses the I/O server of a new file: the file system (none), Firn over several directories \
               (dirs), or Firn on one file system (lustre, moosefs, command)",
        long: "Each new file is stored whole on one server. With `dirs` the backing has a symbolic link to the file in \
               its lane. Choose placement for four files or more on each server.",
        changes_promises: true,
        get: |options| word(options.placement),
        set: |options, value| options.placement = value.choice(),
    },
    Row {
        name: "lanes",
        kind: Kind::Directories,
        default: "",
        help: "Directories for files, each on its own server",
        long: "The directories must exist, belong to you or to root, and not be in the backing, the mount point or one \
               another. Other backings and hosts may share them. A file's lane is the sum of the numbers in its path, \
               modulo the number of lanes, so give all hosts the same list in the same order. The list may change at \
               the next mount: existing files remain where they are.",
        changes_promises: false,
        get: |options| {
            let paths: Vec<_> = options.lanes.iter().map(|path| quoted_path(path)).collect();
            paths.join(":")
        },
        set: |options, value| options.lanes = value.directories(),
    },
    Row {
        name: "lane-map",
        kind: Kind::Path,
        default: "",
        help: "With placement: a file that says which names go to which lane",
        long: "Each line has a pattern (`*`, `?`, `[…]`, `{…,…}`), a space and the number of a lane, from 0. Empty \
               lines and lines that begin with `#` are skipped. The first pattern that matches a new file's name, \
               without directories, decides. If none matches, the numbers in the path decide, and without a number the \
               file goes to the lane with the fewest files of its directory.",
        changes_promises: false,
        get: |options| path_text(options.lane_map.as_ref()),
        set: |options, value| options.lane_map = value.directory(),
    },
    Row {
        name: "servers",
        kind: Kind::Servers,
        default: "",
        help: "With placement on one file system: its servers, one for each lane",
        long: "`lustre`: indices of OSTs (`lfs osts`). `moosefs`: storage classes, each with the label of one \
               chunk server; strict ones (`mfsscadmin create -m s`), unless a busy server may be left out. \
               `command`: names of servers that the program of `place-command` accepts. Give all hosts the same \
               list.",
        changes_promises: false,
        get: |options| options.servers.join(":"),
        set: |options, value| options.servers = value.names(),
    },
    Row {
        name: "place-command",
        kind: Kind::Path,
        default: "",
        help: "With placement=command: the program that makes a new file on a server",
        long: "Firn runs `PROGRAM SERVER . NAME` in the new file's directory, as the user that makes the file. The \
               program must make an empty regular file, and fail if the name exists. If it fails, or runs longer than \
               10 s, Firn makes the file without it. `examples/placement` in the source has such programs.",
        changes_promises: false,
        get: |options| path_text(options.place_command.as_ref()),
        set: |options, value| options.place_command = value.directory(),
    },
    Row {
        name: "participants",
        kind: Kind::Hosts,
        default: "off",
        help: "Hosts that commit transactions together, as a number or as names",
        long: "A commit waits for all hosts, and takes effect on all of them or on none. Give every host the same \
               participants.",
        changes_promises: true,
        get: |options| match &options.participants {
            Participants::Off => "off".to_owned(),
            Participants::Count(count) => count.to_string(),
            Participants::Hosts(names) => names.join(":"),
        },
        set: |options, value| {
            options.participants = match value {
                Value::Number(0) => Participants::Off,
                Value::Number(count) => Participants::Count(count as u32),
                other => Participants::Hosts(other.names()),
            }
        },
    },
    Row {
        name: "participants-wait",
        kind: Kind::Duration {
            min_ms: 1000,
            max_ms: 24 * 3600 * 1000,
        },
        default: "5min",
        help: "How long prepare and commit wait for the other participants",
        long: "After this time, the commit is abandoned for all hosts, and their transactions remain open. A decided \
               commit waits this long for the other hosts to apply it.",
        changes_promises: false,
        get: |options| duration_text(options.participants_wait_ms),
        set: |options, value| options.participants_wait_ms = value.number(),
    },
    Row {
        name: "host",
        kind: Kind::Host,
        default: "",
        help: "Name by which other hosts know this host; default: its host name",
        long: "Two mounts of one backing must have different names. A mount that recovers what a dead firnd \
               left must have that firnd's name.",
        changes_promises: false,
        get: |options| options.host.clone().unwrap_or_default(),
        set: |options, value| options.host = value.names().pop(),
    },
    Row {
        name: "partner",
        kind: Kind::Host,
        default: "none",
        help: "Host that keeps copies of this host's held files in memory: none, the next one (next), or the host of \
               this name",
        long: "Needs `firn agent` on both hosts, and a backing that both see. `next`: the hosts form a ring, sorted by \
               name. The partner is the next one outside this host's failure domain (`partner-domains`) whose agent \
               answers.",
        changes_promises: true,
        get: |options| match &options.partner {
            Partner::None => "none".to_owned(),
            Partner::Next => "next".to_owned(),
            Partner::Host(name) => name.clone(),
        },
        set: |options, value| {
            options.partner = match value.names().pop() {
                Some(name) if name == "next" => Partner::Next,
                Some(name) if name != "none" => Partner::Host(name),
                _ => Partner::None,
            }
        },
    },
    Row {
        name: "partner-domains",
        kind: Kind::Path,
        default: "",
        help: "File that says which hosts fail together",
        long: "Each line has a pattern of host names and the name of a failure domain, such as a rack; syntax as in \
               `lane-map`. A host without a line fails alone. If no other domain has an agent, the partner is in the \
               same domain.",
        changes_promises: false,
        get: |options| path_text(options.partner_domains.as_ref()),
        set: |options, value| options.partner_domains = value.directory(),
    },
    Row {
        name: "tokens",
        kind: Kind::Choice(words::<TokenService>()),
        default: "none",
        help: "With several hosts: locks that give each lane one writing host at a time",
        long: "`flock`: locks of files in the backing, whose file system must enforce them between hosts. `etcd`: keys \
               in etcd, 3.4 or later. Give every host the same value.",
        changes_promises: false,
        get: |options| word(options.tokens),
        set: |options, value| options.tokens = value.choice(),
    },
    Row {
        name: "token-hold",
        kind: Kind::Duration {
            min_ms: 10,
            max_ms: 60_000,
        },
        default: "1s",
        help: "How long a host keeps a token while other hosts wait for it",
        long: "With a longer time the server switches between hosts less often, and hosts wait longer.",
        changes_promises: false,
        get: |options| duration_text(options.token_hold_ms),
        set: |options, value| options.token_hold_ms = value.number(),
    },
    Row {
        name: "token-wait",
        kind: Kind::Duration {
            min_ms: 100,
            max_ms: 3600 * 1000,
        },
        default: "5s",
        help: "How long a drain waits for a token before it writes without it",
        long: "Choose a longer time for longer queues.",
        changes_promises: false,
        get: |options| duration_text(options.token_wait_ms),
        set: |options, value| options.token_wait_ms = value.number(),
    },
    Row {
        name: "token-endpoints",
        kind: Kind::Endpoints,
        default: "",
        help: "Client addresses of the members of the etcd cluster",
        long: "Firn asks the members in turn, beginning with the one that answered last. It uses plain HTTP without a \
               password: use a trusted network, or a proxy on each host.",
        changes_promises: false,
        get: |options| options.token_endpoints.join("+"),
        set: |options, value| options.token_endpoints = value.names(),
    },
    Row {
        name: "token-group",
        kind: Kind::Host,
        default: "",
        help: "Name under which hosts share tokens in etcd; default: the name of the backing",
        long: "Give jobs with different backings the same name if their lanes are the same I/O servers in the \
               same order.",
        changes_promises: false,
        get: |options| options.token_group.clone().unwrap_or_default(),
        set: |options, value| options.token_group = value.names().pop(),
    },
    Row {
        name: "rules",
        kind: Kind::Rules,
        default: "",
        help: "Commit rules: make the checkpoints of unchanged programs atomic",
        long: "A rule says which changes are one checkpoint, and when it is complete. If all writers end before that, \
               the checkpoint is undone. `firn rules list` names the built-in rules.",
        changes_promises: true,
        get: |options| options.rules.join(":"),
        set: |options, value| options.rules = value.names(),
    },
    Row {
        name: "backup",
        kind: Kind::Directory,
        default: "",
        help: "Second directory for prepared transactions, on another file system",
        long: "`firn prepare` and `firn commit` also copy what the commit needs to this directory; `firn recover \
               --from-backup` finishes the commit on a copy of the backing. The backup needs as much space as the \
               transaction writes. Owner and mode: as for `arena-dir`.",
        changes_promises: true,
        get: |options| path_text(options.backup.as_ref()),
        set: |options, value| options.backup = value.directory(),
    },
    Row {
        name: "backup-every",
        kind: Kind::Duration {
            min_ms: 1000,
            max_ms: 24 * 3600 * 1000,
        },
        default: "10s",
        help: "How often files of an open transaction are copied to the backup",
        long: "A file is copied when it has not changed for this long, and again if it changes later. Early copies \
               shorten the prepare, during which programs wait.",
        changes_promises: false,
        get: |options| duration_text(options.backup_every_ms),
        set: |options, value| options.backup_every_ms = value.number(),
    },
    Row {
        name: "layout",
        kind: Kind::Choice(words::<Layout>()),
        default: "plain",
        help: "How the bytes of a new file are stored in the backing until it is closed: in the file (plain), or in a \
               log of each host (log)",
        long: "`log`: several hosts may write one file at the same time, each to its own log in `.firn/log` of the \
               backing. Programs that read the backing without Firn see a file that is too short until its logs are \
               flattened (`flatten`). Give all hosts the same layout. For files that only one host writes, `log` costs \
               time and gains nothing.",
        changes_promises: true,
        get: |options| word(options.layout),
        set: |options, value| options.layout = value.choice(),
    },
    Row {
        name: "log-files",
        kind: Kind::Patterns,
        default: "",
        help: "Patterns of names of files that are stored in logs; default: all files",
        long: "A file's name, without directories, is compared when the file is opened. A pattern may have \
               `*`, `?`, `[…]` and, in a configuration file, `{…,…}`: `log-files=*.h5:restart_*.nc`.",
        changes_promises: false,
        get: |options| options.log_files.join(":"),
        set: |options, value| options.log_files = value.names(),
    },
    Row {
        name: "flatten",
        kind: Kind::Choice(words::<Flatten>()),
        default: "behind",
        help: "When the logs of a file become the plain file: in the background after its last close (behind), before \
               that close returns (close), at the unmount (demand), at the unmount or when the file is opened for \
               reading (read), or never by this mount (off)",
        long: "If programs read the backing without Firn, run `firn wait` first, or choose `close`. `firn umount` \
               flattens files that no host writes, except with `off`; `firn flatten`, `firn drain --wait` and `firn \
               wait` do so at any time.",
        changes_promises: true,
        get: |options| word(options.flatten),
        set: |options, value| options.flatten = value.choice(),
    },
    Row {
        name: "close",
        kind: Kind::Choice(words::<Close>()),
        default: "auto",
        help: "When close returns: when the file is in the backing (drain), or at once (held)",
        long: "`auto`: `held` with drain=demand and with drain=commit in buffer mode, else `drain`. `drain`: other \
               hosts, and programs that use the backing without Firn, see a closed file as after a native close, and \
               close reports errors of the backing. `held`: the data survives the death of every process, but is lost \
               if the host fails before it is drained.",
        changes_promises: true,
        get: |options| word(options.close),
        set: |options, value| options.close = value.choice(),
    },
    Row {
        name: "fsync",
        kind: Kind::Choice(words::<Fsync>()),
        default: "durable",
        help: "What fsync waits for: data durable in the backing (durable), or nothing (held)",
        long: "With `held`, the data survives the death of every process, but not of the host. Choose `held` for \
               programs that call fsync more often than they need, or if a partner covers the loss of the host.",
        changes_promises: true,
        get: |options| word(options.fsync),
        set: |options, value| options.fsync = value.choice(),
    },
    Row {
        name: "drain-age",
        kind: Kind::Duration {
            min_ms: 0,
            max_ms: 86_400_000,
        },
        default: "5s",
        help: "Longest time that written data waits for its chunk to fill",
        long: "The time bounds how much is lost if the host fails. A shorter time makes smaller writes.",
        changes_promises: true,
        get: |options| duration_text(options.drain_age_ms),
        set: |options, value| options.drain_age_ms = value.number(),
    },
    Row {
        name: "drain-cpu",
        kind: Kind::Count {
            min: 1,
            max: 100,
            zero: None,
        },
        default: "100",
        help: "Percentage of one CPU that the drain may use while programs use all CPUs; 100: no limit",
        long: "The limit holds while programs compute on all CPUs, no caller waits for a drain, and at least a quarter \
               of the arena is free. Data then remains in the arena longer, half a minute with `3`. Choose `3` for a \
               training loop, and `100` for MPI programs, which use all CPUs while they wait.",
        changes_promises: true,
        get: |options| options.drain_cpu_percent.to_string(),
        set: |options, value| options.drain_cpu_percent = value.number() as u32,
    },
    Row {
        name: "fuse-threads",
        kind: Kind::Count {
            min: 0,
            max: 256,
            zero: Some("auto"),
        },
        default: "auto",
        help: "Threads that serve requests of the kernel",
        long: "`auto`: one per core.",
        changes_promises: false,
        get: |options| {
            if options.fuse_threads == 0 {
                "auto".to_owned()
            } else {
                options.fuse_threads.to_string()
            }
        },
        set: |options, value| options.fuse_threads = value.number() as u32,
    },
    Row {
        name: "allow-other",
        kind: Kind::Switch,
        default: "no",
        help: "Let other users access the mount",
        long: "The kernel checks permissions as on any file system. Users other than root need \
               `user_allow_other` in /etc/fuse.conf.",
        changes_promises: false,
        get: |options| switch_text(options.allow_other),
        set: |options, value| options.allow_other = value.switch(),
    },
    Row {
        name: "passthrough",
        kind: Kind::Choice(words::<Passthrough>()),
        default: "auto",
        help: "Let the kernel read drained files straight from the backing",
        long: "`auto`: as root, on Linux 6.9 or later, over a backing that is not on a stacked file system such \
               as overlayfs.",
        changes_promises: false,
        get: |options| word(options.passthrough),
        set: |options, value| options.passthrough = value.choice(),
    },
    Row {
        name: "takeover",
        kind: Kind::Choice(words::<Takeover>()),
        default: "auto",
        help: "Let another firnd continue the mount if firnd dies, so that programs only wait",
        long: "With `auto`, a small process (firn-keeper) holds the connection to the kernel, and starts firnd again: \
               open files, directories, locks and mappings remain valid. Open transactions in buffer mode and open \
               checkpoints of commit rules are aborted. `firn status` says whether a mount would be taken over.",
        changes_promises: true,
        get: |options| word(options.takeover),
        set: |options, value| options.takeover = value.choice(),
    },
    Row {
        name: "watchdog",
        kind: Kind::Duration {
            min_ms: 0,
            max_ms: 86_400_000,
        },
        default: "0",
        help: "Kill a firnd that hangs for this long, and let another continue the mount; 0: never",
        long: "Needs `takeover=auto`. The keeper polls firnd four times in this time. A firnd that waits for a slow \
               backing still answers. A lack of memory or CPUs may stop a healthy firnd for seconds, and a debugger \
               may stop it for longer.",
        changes_promises: false,
        get: |options| duration_text(options.watchdog_ms),
        set: |options, value| options.watchdog_ms = value.number(),
    },
    Row {
        name: "memory-files",
        kind: Kind::Size {
            min: 0,
            max: 1 << 40,
            power_of_two: false,
        },
        default: "16M",
        help: "Smallest size of a held file that moves to a memory file; 0: no file does",
        long: "With `drain=demand`, a held file of this size or more is moved to a separate file in memory, in the \
               background and at the pace of `drain-cpu`, once its writers have closed it. As root, on Linux 6.9 or \
               later and with `passthrough=auto`, the kernel reads it there at the speed of its page cache. The bytes \
               count in `arena-size`. Not with `frontend=preload`.",
        changes_promises: false,
        get: |options| size_text(options.memory_file_bytes_min),
        set: |options, value| options.memory_file_bytes_min = value.number(),
    },
    Row {
        name: "arena-dir",
        kind: Kind::Directory,
        default: "",
        help: "Directory for the arena, on tmpfs, hugetlbfs or a DAX file system",
        long: "The default is the runtime directory, /dev/shm/firn-UID. To recover the arena, give the same directory. \
               The directory and those above it must belong to you or to root; one that other users may write to needs \
               the sticky bit.",
        changes_promises: false,
        get: |options| path_text(options.arena_dir.as_ref()),
        set: |options, value| options.arena_dir = value.directory(),
    },
    Row {
        name: "numa-topology",
        kind: Kind::Path,
        default: "/sys/devices/system/node",
        help: "Directory that describes the NUMA nodes of the machine; empty: ignore NUMA",
        long: "Give another directory with `online`, `nodeN/cpulist` and `nodeN/distance` where the kernel's is not \
               visible, as in some containers, or to divide the arena differently.",
        changes_promises: false,
        get: |options| path_text(options.numa_topology.as_ref()),
        set: |options, value| options.numa_topology = value.directory(),
    },
    Row {
        name: "spill",
        kind: Kind::Path,
        default: "",
        help: "File or directory on a local disk that takes data when memory runs short",
        long: "If you name a directory, Firn makes the file in it. The oldest full chunks move to this file, and are \
               read and drained from there. The file must not be in the mount, the backing or memory, and is removed \
               with the arena. Owner and mode of its directory: as for `arena-dir`.",
        changes_promises: false,
        get: |options| path_text(options.spill.as_ref()),
        set: |options, value| options.spill = value.directory(),
    },
    Row {
        name: "spill-size",
        kind: Kind::Size {
            min: 0,
            max: 64 << 40,
            power_of_two: false,
        },
        default: "0",
        help: "Size of the spill file; 0: as large as arena-size",
        long: "The file has at least one chunk and is allocated at the mount. Each chunk in it takes 0.9 % of its size \
               in memory.",
        changes_promises: false,
        get: |options| size_text(options.spill_bytes),
        set: |options, value| options.spill_bytes = value.number(),
    },
    Row {
        name: "spill-upper",
        kind: Kind::Count {
            min: 0,
            max: 100,
            zero: None,
        },
        default: "80",
        help: "Percentage of the arena in use above which chunks move to the spill file",
        long: "Choose less for large bursts: the free part of the arena accepts them at memory speed.",
        changes_promises: false,
        get: |options| options.spill_upper_percent.to_string(),
        set: |options, value| options.spill_upper_percent = value.number() as u32,
    },
    Row {
        name: "spill-lower",
        kind: Kind::Count {
            min: 0,
            max: 100,
            zero: None,
        },
        default: "60",
        help: "Percentage of the arena in use at which chunks stop moving to the spill file",
        long: "The difference to `spill-upper` is how much is written to the disk at once.",
        changes_promises: false,
        get: |options| options.spill_lower_percent.to_string(),
        set: |options, value| options.spill_lower_percent = value.number() as u32,
    },
    Row {
        name: "attr-timeout",
        kind: Kind::Duration {
            min_ms: 0,
            max_ms: 3_600_000,
        },
        default: "1s",
        help: "How long the kernel may cache names and attributes",
        long: "A change made in the backing without Firn, as by another host, is visible after this time at the \
               latest. With `0`, the kernel asks every time. With `layout=log` or `tokens`, it always asks for \
               names.",
        changes_promises: false,
        get: |options| duration_text(options.attr_timeout_ms),
        set: |options, value| options.attr_timeout_ms = value.number(),
    },
    Row {
        name: "log-level",
        kind: Kind::Choice(words::<LogLevel>()),
        default: "info",
        help: "How much firnd logs",
        long: "The log is the mount's `.log` file in the runtime directory, or stderr with --foreground.",
        changes_promises: false,
        get: |options| word(options.log_level),
        set: |options, value| options.log_level = value.choice(),
    },
    Row {
        name: "system-log",
        kind: Kind::PathOrOff,
        default: "/dev/log",
        help: "Socket of the host's system log, of journald or syslog",
        long: "firnd in the background sends errors, warnings and `info` lines here too (`journalctl -t firnd`); \
               `log-level=warn` leaves `info` out. firnd drops lines that the system log does not accept at once, and \
               reports their number there. Users that can read the system log see paths of your files.",
        changes_promises: false,
        get: |options| match &options.system_log {
            Some(path) => quoted_path(path),
            None => "off".to_owned(),
        },
        set: |options, value| options.system_log = value.path_or_off(),
    },
    Row {
        name: "record-in",
        kind: Kind::Choice(words::<RecordPlace>()),
        default: "host",
        help: "Where firnd leaves its record of the run, for `firn report`",
        long: "`host`: in the runtime directory, when the mount ends. `backing`: also in `.firn/records` of the \
               backing, once a minute and at the end, so that a report shows all hosts of a job. The last 8 records of \
               each host are kept, for 90 days at most.",
        changes_promises: false,
        get: |options| word(options.record),
        set: |options, value| options.record = value.choice(),
    },
    Row {
        name: "read-only",
        kind: Kind::Switch,
        default: "no",
        help: "Refuse all changes",
        long: "Data held in an existing arena is still drained.",
        changes_promises: false,
        get: |options| switch_text(options.read_only),
        set: |options, value| options.read_only = value.switch(),
    },
    Row {
        name: "nonempty",
        kind: Kind::Switch,
        default: "no",
        help: "Mount over a directory that is not empty",
        long: "Otherwise a mount over files is refused. A stub tree (`frontend=preload`) always needs an empty \
               directory.",
        changes_promises: false,
        get: |options| switch_text(options.nonempty),
        set: |options, value| options.nonempty = value.switch(),
    },
    Row {
        name: "populate",
        kind: Kind::Switch,
        default: "yes",
        help: "Allocate the arena's memory at mount time instead of at first use",
        long: "With `no`, the first checkpoint pays for the allocation, and a lack of memory is noticed \
               late.",
        changes_promises: false,
        get: |options| switch_text(options.populate),
        set: |options, value| options.populate = value.switch(),
    },
];

/// A combination of values of two options that is refused.
pub struct Contradiction {
    /// Names of the two options. The first one is more likely the mistake.
    pub names: [&'static str; 2],
    /// The rule as docs/CONFIGURATION.md states it.
    pub text: &'static str,
    /// Whether the options have this contradiction.
    pub is_present: fn(&Options) -> bool,
    /// What the user must change.
    pub advice: &'static str,
}

/// An option that has an effect only with a certain value of another option, and therefore sets the other option.
pub struct Implied {
    /// Name of the option that a source gives.
    pub name: &'static str,
    /// Name of the other option, which gets `value` unless a source sets it.
    pub implied_name: &'static str,
    /// Value that the other option gets.
    pub value: &'static str,
    /// Whether the two values fit together. False only if a source sets the other option to a value that does not fit.
    pub is_satisfied: fn(&Options) -> bool,
    /// What the user must change if they do not fit.
    pub advice: &'static str,
}

/// All options that set others.
pub static IMPLIED: [Implied; 12] = [
    Implied {
        name: "history",
        implied_name: "drain",
        value: "commit",
        is_satisfied: |options| options.drain == Drain::Commit,
        advice: "there are no commits without transactions: omit history, or use drain=commit",
    },
    Implied {
        name: "mode",
        implied_name: "drain",
        value: "commit",
        is_satisfied: |options| options.drain == Drain::Commit,
        advice: "mode applies to transactions only: omit mode, or use drain=commit",
    },
    Implied {
        name: "participants",
        implied_name: "drain",
        value: "commit",
        is_satisfied: |options| options.drain == Drain::Commit,
        advice: "hosts commit only transactions together: omit participants, or use drain=commit",
    },
    Implied {
        name: "backup",
        implied_name: "drain",
        value: "commit",
        is_satisfied: |options| options.drain == Drain::Commit,
        advice: "only transactions are backed up: omit backup, or use drain=commit",
    },
    Implied {
        name: "rules",
        implied_name: "drain",
        value: "commit",
        is_satisfied: |options| options.drain == Drain::Commit,
        advice: "rules begin and commit transactions: omit rules, or use drain=commit",
    },
    Implied {
        name: "lanes",
        implied_name: "placement",
        value: "dirs",
        is_satisfied: |options| options.placement == Placement::Dirs,
        advice: "only Firn itself places files in directories: use placement=dirs, or omit lanes",
    },
    Implied {
        name: "lane-map",
        implied_name: "placement",
        value: "dirs",
        is_satisfied: |options| options.placement != Placement::None,
        advice: "without placement nothing goes to lanes: omit placement=none or lane-map",
    },
    Implied {
        name: "place-command",
        implied_name: "placement",
        value: "command",
        is_satisfied: |options| options.placement == Placement::Command,
        advice: "the program runs with placement=command only: use that, or omit place-command",
    },
    Implied {
        name: "log-files",
        implied_name: "layout",
        value: "log",
        is_satisfied: |options| options.layout == Layout::Log,
        advice: "with layout=plain no file lies in logs: use layout=log, or omit log-files",
    },
    Implied {
        name: "partner-domains",
        implied_name: "partner",
        value: "next",
        is_satisfied: |options| options.partner == Partner::Next,
        advice: "failure domains do not matter for a partner that is named: omit partner-domains, or use partner=next",
    },
    Implied {
        name: "token-endpoints",
        implied_name: "tokens",
        value: "etcd",
        is_satisfied: |options| options.tokens == TokenService::Etcd,
        advice: "only etcd has endpoints: omit token-endpoints, or use tokens=etcd",
    },
    Implied {
        name: "token-group",
        implied_name: "tokens",
        value: "etcd",
        is_satisfied: |options| options.tokens == TokenService::Etcd,
        advice: "only tokens in etcd have a group: omit token-group, or use tokens=etcd",
    },
];

/// Whether the participants are named, and this host is none of them.
fn is_host_missing_in_participants(options: &Options) -> bool {
    match (&options.participants, &options.host) {
        (Participants::Hosts(names), Some(host)) => !names.contains(host),
        _ => false,
    }
}

/// All contradictions.
pub static CONTRADICTIONS: [Contradiction; 16] = [
    Contradiction {
        names: ["chunk-size", "arena-size"],
        text: "chunk-size may not exceed arena-size",
        is_present: |options| options.chunk_bytes > options.arena_bytes,
        advice: "the arena must hold at least one chunk: raise arena-size or lower chunk-size",
    },
    Contradiction {
        names: ["drain", "frontend"],
        text: "drain=commit requires frontend=fuse",
        is_present: |options| {
            options.drain == Drain::Commit && options.frontend == Frontend::Preload
        },
        advice: "a stub tree has no transactions: omit frontend, or use drain=demand",
    },
    Contradiction {
        names: ["placement", "lanes"],
        text: "placement=dirs requires lanes",
        is_present: |options| options.placement == Placement::Dirs && options.lanes.is_empty(),
        advice: "name the directories that files go to, as in lanes=/srv0/x:/srv1/x",
    },
    Contradiction {
        names: ["placement", "servers"],
        text: "servers and placement on one file system require each other",
        is_present: |options| options.placement.is_steered() == options.servers.is_empty(),
        advice: "name both, as in placement=lustre,servers=0:1:2:3, or omit both",
    },
    Contradiction {
        names: ["placement", "place-command"],
        text: "placement=command requires place-command",
        is_present: |options| {
            options.placement == Placement::Command && options.place_command.is_none()
        },
        advice: "name the program that makes files, as in place-command=/usr/local/bin/place",
    },
    Contradiction {
        names: ["mode", "history"],
        text: "mode=shadow excludes history",
        is_present: |options| options.mode == Mode::Shadow && options.history > 0,
        advice: "older commits can be restored with mode=buffer only: omit history, or use mode=buffer",
    },
    Contradiction {
        names: ["participants", "history"],
        text: "participants exclude history",
        is_present: |options| options.participants != Participants::Off && options.history > 0,
        advice: "commits of several hosts cannot be restored: omit history",
    },
    Contradiction {
        names: ["participants", "host"],
        text: "host is not one of the participants",
        is_present: is_host_missing_in_participants,
        advice: "add this host to the participants, or give it one of their names",
    },
    Contradiction {
        names: ["tokens", "token-endpoints"],
        text: "tokens=etcd requires token-endpoints",
        is_present: |options| {
            options.tokens == TokenService::Etcd && options.token_endpoints.is_empty()
        },
        advice: "say where etcd is: token-endpoints=HOST:PORT",
    },
    Contradiction {
        names: ["token-wait", "token-hold"],
        text: "token-wait must be at least twice token-hold",
        is_present: |options| options.token_wait_ms < 2 * options.token_hold_ms,
        advice: "a host may keep a token for token-hold without being stuck: raise token-wait or lower token-hold",
    },
    Contradiction {
        names: ["rules", "mode"],
        text: "rules require mode=buffer",
        is_present: |options| !options.rules.is_empty() && options.mode == Mode::Shadow,
        advice: "with mode=shadow the backing shows a checkpoint before it is complete: omit rules, or use mode=buffer",
    },
    Contradiction {
        names: ["backup", "mode"],
        text: "backup requires mode=buffer",
        is_present: |options| options.backup.is_some() && options.mode == Mode::Shadow,
        advice: "with mode=shadow changes go to the backing, not to the backup: omit backup, or use mode=buffer",
    },
    Contradiction {
        names: ["backup", "participants"],
        text: "backup excludes participants",
        is_present: |options| options.backup.is_some() && options.participants != Participants::Off,
        advice: "if a host is lost, the other hosts finish what it has prepared: omit backup or participants",
    },
    Contradiction {
        names: ["backup", "history"],
        text: "backup excludes history",
        is_present: |options| options.backup.is_some() && options.history > 0,
        advice: "a commit that is finished from its backup cannot be undone: omit backup or history",
    },
    Contradiction {
        names: ["frontend", "allow-other"],
        text: "frontend=preload excludes allow-other and read-only",
        is_present: |options| {
            options.frontend == Frontend::Preload && (options.allow_other || options.read_only)
        },
        advice: "a stub tree is served to the mounting user only, for reading and writing: omit them, or use frontend=fuse",
    },
    Contradiction {
        names: ["spill-lower", "spill-upper"],
        text: "spill-lower may not exceed spill-upper",
        is_present: |options| options.spill_lower_percent > options.spill_upper_percent,
        advice: "chunks move from the upper threshold down to the lower one: lower spill-lower or raise spill-upper",
    },
];

/// Returns the words of a choice, in the order of its values.
const fn words<T: VariantNames>() -> &'static [&'static str] {
    T::VARIANTS
}

/// Returns the word of a value of a choice.
fn word(value: impl Into<&'static str>) -> String {
    value.into().to_owned()
}

/// Formats a switch.
fn switch_text(is_on: bool) -> String {
    if is_on { "yes" } else { "no" }.to_owned()
}

/// Formats a path for readers; empty if there is none.
fn path_text(path: Option<&PathBuf>) -> String {
    path.map_or_else(String::new, |path| quoted_path(path))
}

/// Unpacks values for `set`. The `kind` of a row fixes the variant, so another variant is a mistake in the table.
impl Value {
    fn number(self) -> u64 {
        match self {
            Value::Number(number) => number,
            other => panic!("the table expects a number, got {other:?}"),
        }
    }

    fn choice<T: VariantArray + Copy>(self) -> T {
        match self {
            Value::Choice(index) => T::VARIANTS[index],
            other => panic!("the table expects a word, got {other:?}"),
        }
    }

    fn switch(self) -> bool {
        match self {
            Value::Switch(is_on) => is_on,
            other => panic!("the table expects yes or no, got {other:?}"),
        }
    }

    fn names(self) -> Vec<String> {
        match self {
            Value::Names(names) => names,
            other => panic!("the table expects names, got {other:?}"),
        }
    }

    fn directories(self) -> Vec<PathBuf> {
        match self {
            Value::Directories(paths) => paths,
            other => panic!("the table expects directories, got {other:?}"),
        }
    }

    fn directory(self) -> Option<PathBuf> {
        match self {
            Value::Directory(path) => Some(path),
            other => panic!("the table expects a directory, got {other:?}"),
        }
    }

    fn path_or_off(self) -> Option<PathBuf> {
        match self {
            Value::Off => None,
            path => path.directory(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_is_in_range_and_reads_back() {
        let options = Options::default();
        for row in &TABLE {
            if !row.default.is_empty() {
                row.kind
                    .parse(row.default)
                    .unwrap_or_else(|why| panic!("{}: {why}", row.name));
            }
            assert_eq!((row.get)(&options), row.default, "{}", row.name);
        }
        assert!(
            CONTRADICTIONS
                .iter()
                .all(|rule| !(rule.is_present)(&options))
        );
    }

    #[test]
    fn every_word_of_a_choice_reads_back_as_itself() {
        for row in &TABLE {
            let Kind::Choice(words) = row.kind else {
                continue;
            };
            for word in words {
                let mut options = Options::default();
                (row.set)(&mut options, row.kind.parse(word).unwrap());
                assert_eq!((row.get)(&options), *word);
            }
        }
    }

    #[test]
    fn what_is_brought_along_fits() {
        for implied in &IMPLIED {
            assert!(row(implied.name).is_some(), "{}", implied.name);
            let other = row(implied.implied_name).expect("an option");
            let mut options = Options::default();
            assert!(!(implied.is_satisfied)(&options), "{}", implied.name);
            let value = other.kind.parse(implied.value).expect("a value");
            (other.set)(&mut options, value);
            assert!((implied.is_satisfied)(&options), "{}", implied.name);
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = TABLE.iter().map(|row| row.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TABLE.len());
    }
}
