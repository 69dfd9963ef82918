//! firnd's end of the connection with its keeper: gives it descriptors, answers its pings, and replaces it if it dies.
//! firnd serves the mount; the keeper starts the next firnd when one dies. A service manager can have the keeper's
//! place.
//!
//! Promises
//! * All descriptors that a keeper holds are held here too, so another keeper can get them.
//! * No call waits for a keeper longer than [`SEND_TIMEOUT`].

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use firn_engine::{FileKeeper, HiddenFile, InodeId};
use firn_hosts::KeptLockFile;
use firn_workers::spawn_thread;
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, getpid, getppid, pidfd_open};

use super::message::{KeptDescriptor, Label, Message, Socket, Tag, UpgradeResult, uptime};
use super::service_manager::{self, ServiceManager};
use super::{KEEPER_NAME, REPLACES, abort_connection};
use crate::spawn::read_failure;

/// Limit of keepers that firnd starts: a host that kills each of them does not want one.
const KEEPERS_MAX: u32 = 20;

/// Timeout for a message to a stopped keeper. The removal of an open file's name waits for such a message; after the
/// timeout the keeper does not get the file.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// What firnd gets from its keeper at its start.
pub(crate) struct KeeperHandover {
    /// The connection with the keeper.
    pub(crate) link: Arc<KeeperLink>,
    /// The process that asked for the mount and ends it, if there is one.
    pub(crate) caller: Option<OwnedFd>,
    /// The mount that an earlier firnd served, if this firnd takes it over.
    pub(crate) resumed: Option<ResumedMount>,
}

/// A mount that outlived its firnd.
pub(crate) struct ResumedMount {
    /// The connection to the kernel; `None` for a stub tree.
    pub(crate) device: Option<OwnedFd>,
    /// When the death of the earlier firnd was seen, as time since the boot.
    pub(crate) death_time: Duration,
    /// Open files that have no name any more.
    pub(crate) nameless_files: Vec<HiddenFile>,
    /// Lock files in which the earlier firnd had locks.
    pub(crate) lock_files: Vec<KeptLockFile>,
}

/// The connection with the keeper, from firnd's side.
pub(crate) struct KeeperLink {
    state: Mutex<LinkState>,
    /// A callback that returns only if firnd can answer requests; `None` while firnd does not serve.
    probe: Mutex<Option<Probe>>,
    /// The result of the last upgrade of the mount, for the status.
    pub(crate) last_upgrade: String,
}

/// A function that takes each lock which a request takes, and then returns.
type Probe = Arc<dyn Fn() + Send + Sync>;

/// The descriptors that an upgrade passes to the next firnd.
pub(crate) struct NextFirnd {
    pub(crate) program: OwnedFd,
    pub(crate) request: OwnedFd,
    /// An empty file, to which the next firnd writes why it does not serve.
    pub(crate) report: OwnedFd,
}

/// The process that holds the descriptors.
enum DescriptorHolder {
    Keeper(Arc<Socket>),
    ServiceManager(Arc<ServiceManager>),
}

impl DescriptorHolder {
    fn keep_descriptor(&self, label: Label, descriptor: &OwnedFd) -> io::Result<()> {
        match self {
            Self::Keeper(socket) => socket.send_descriptor(label, descriptor),
            Self::ServiceManager(manager) => manager.store(label, descriptor.as_fd()),
        }
    }

    fn drop_descriptor(&self, label: Label) -> io::Result<()> {
        match self {
            Self::Keeper(socket) => socket.send_drop(label),
            Self::ServiceManager(manager) => manager.remove(label),
        }
    }
}

struct LinkState {
    holder: DescriptorHolder,
    /// The descriptors that the keeper has, for another keeper.
    kept: Vec<KeptDescriptor>,
    is_ending: bool,
    /// Number of keepers that firnd has started in place of dead ones.
    keepers_started: u32,
    /// Process number of the keeper.
    keeper: Option<Pid>,
    /// Time in which firnd must answer a ping; 0 if the keeper does not ping.
    watchdog: Duration,
}

impl KeeperHandover {
    /// Receives what the keeper at the other end of stdin has for this firnd: descriptors of the mount, then one
    /// message that says whether an earlier firnd has died. The keeper starts the next firnd when one dies.
    pub(crate) fn receive() -> io::Result<Self> {
        let socket = Socket::new(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
        socket.limit_waits(SEND_TIMEOUT)?;
        let mut kept = Vec::new();
        let (death_time, last_upgrade) = loop {
            match socket.receive()? {
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(Message::Keep(received)) => kept.push(received),
                Some(Message::Begin {
                    death_time,
                    last_upgrade,
                }) => break (death_time, last_upgrade),
                Some(_) => {}
            }
        };
        let caller = copy_descriptor(&kept, Tag::Caller)?;
        let last_upgrade = describe_upgrade(last_upgrade, &kept)?;
        let resumed = match death_time {
            Some(death_time) => Some(ResumedMount::from_kept(&kept, death_time)?),
            None => None,
        };
        let holder = DescriptorHolder::Keeper(Arc::new(socket));
        Ok(Self {
            link: KeeperLink::new(holder, kept, last_upgrade),
            caller,
            resumed,
        })
    }

    /// Finds a service manager (systemd) that holds the descriptors of this mount; `None` if there is none. If they
    /// include the FUSE connection of the mount, an earlier firnd has died, and this one continues the mount.
    pub(crate) fn from_service_manager() -> io::Result<Option<Self>> {
        let Some(manager) = ServiceManager::find(SEND_TIMEOUT)? else {
            return Ok(None);
        };
        let mut kept = service_manager::take_stored();
        let has_connection = kept.iter().any(|kept| kept.label.tag == Tag::Device);
        let resumed = if has_connection {
            // When the earlier firnd died is unknown. With a later time, more programs count as affected.
            Some(ResumedMount::from_kept(&kept, uptime())?)
        } else {
            // The mount of these descriptors never began, or has ended: its locks must not stay.
            for leftover in kept.drain(..) {
                manager.remove(leftover.label)?;
            }
            None
        };
        let holder = DescriptorHolder::ServiceManager(Arc::new(manager));
        Ok(Some(Self {
            link: KeeperLink::new(holder, kept, String::new()),
            caller: None,
            resumed,
        }))
    }
}

/// Describes the result of the last upgrade for the status; empty if there was none.
fn describe_upgrade(upgrade: UpgradeResult, kept: &[KeptDescriptor]) -> io::Result<String> {
    Ok(match upgrade {
        UpgradeResult::None => String::new(),
        UpgradeResult::Done => "done".into(),
        UpgradeResult::Refused => {
            let report = copy_descriptor(kept, Tag::UpgradeReport)?;
            match report.and_then(read_failure) {
                Some(why) => format!("refused: {why}"),
                None => "refused: the new firnd ended without a reason".into(),
            }
        }
    })
}

impl ResumedMount {
    /// Returns the mount that these descriptors belong to. Its serving process died at `death_time` after the boot, and
    /// the keeper, a process beside it, has kept them open. They are duplicated, so `kept` stays complete for the next
    /// serving process.
    fn from_kept(kept: &[KeptDescriptor], death_time: Duration) -> io::Result<Self> {
        let device = copy_descriptor(kept, Tag::Device)?;
        let mut nameless_files = Vec::new();
        let mut lock_files = Vec::new();
        for KeptDescriptor { label, descriptor } in kept {
            match label.tag {
                Tag::NamelessFile => nameless_files.push(HiddenFile {
                    node: InodeId(label.number),
                    descriptor: descriptor.try_clone()?,
                }),
                Tag::LockFile => lock_files.push(KeptLockFile {
                    ino: label.number,
                    descriptor: descriptor.try_clone()?,
                }),
                _ => {}
            }
        }
        Ok(Self {
            device,
            death_time,
            nameless_files,
            lock_files,
        })
    }
}

impl fmt::Debug for KeeperLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeeperLink").finish_non_exhaustive()
    }
}

impl KeeperLink {
    fn new(holder: DescriptorHolder, kept: Vec<KeptDescriptor>, last_upgrade: String) -> Arc<Self> {
        let state = LinkState {
            holder,
            kept,
            is_ending: false,
            keepers_started: 0,
            keeper: getppid(),
            watchdog: Duration::ZERO,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            probe: Mutex::new(None),
            last_upgrade,
        })
    }

    /// Returns the mount request that the keeper has, a file of JSON.
    pub(crate) fn request(&self) -> io::Result<OwnedFd> {
        let request = copy_descriptor(&self.state.lock().kept, Tag::Request)?;
        request.ok_or(io::ErrorKind::InvalidData.into())
    }

    /// Returns a copy of the descriptor that the keeper has under this tag; `None` if there is none.
    pub(crate) fn copy_kept_descriptor(&self, tag: Tag) -> io::Result<Option<OwnedFd>> {
        copy_descriptor(&self.state.lock().kept, tag)
    }

    /// Returns whether a service manager has the keeper's place.
    pub(crate) fn is_to_service_manager(&self) -> bool {
        matches!(
            self.state.lock().holder,
            DescriptorHolder::ServiceManager(_)
        )
    }

    /// Gives the keeper, which starts the next firnd when this one dies, a descriptor to hold. It replaces one with the
    /// same label. An error means that this keeper did not get it; a later keeper does. Once the mount ends, nothing is
    /// done.
    pub(crate) fn keep_descriptor(
        &self,
        label: impl Into<Label>,
        descriptor: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let label = label.into();
        let descriptor = descriptor.try_clone_to_owned()?;
        let mut state = self.state.lock();
        if state.is_ending {
            return Ok(());
        }
        let send_result = state.holder.keep_descriptor(label, &descriptor);
        // The descriptor is kept here even after an error, for the next keeper.
        state.kept.retain(|kept| kept.label != label);
        state.kept.push(KeptDescriptor { label, descriptor });
        send_result
    }

    /// Makes the keeper close the descriptor with this label.
    pub(crate) fn drop_descriptor(&self, label: Label) {
        let mut state = self.state.lock();
        // After a failure the keeper is dead, and the next keeper does not get the descriptor.
        let _ = state.holder.drop_descriptor(label);
        state.kept.retain(|kept| kept.label != label);
    }

    /// Gives the keeper the connection of the mount. From now on another firnd can take the mount over.
    pub(crate) fn keep_connection(
        &self,
        device: Option<BorrowedFd<'_>>,
        control: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        if let Some(device) = device {
            self.keep_descriptor(Tag::Device, device)?;
        }
        if let Some(control) = control {
            self.keep_descriptor(Tag::Control, control)?;
        }
        let null = std::fs::File::open("/dev/null")?;
        self.keep_descriptor(Tag::CanBeTakenOver, null.as_fd())
    }

    /// Gives the keeper the log, which is standard error. A firnd that cannot take the mount over writes the reason
    /// there.
    pub(crate) fn keep_log(&self) {
        if let Err(error) = self.keep_descriptor(Tag::Log, rustix::stdio::stderr()) {
            tracing::warn!(%error, "the keeper, which restarts firnd, does not answer");
        }
    }

    /// Gives the keeper the program to start when this firnd dies. Returns the process number of the keeper.
    pub(crate) fn keep_next_program(&self, next: &NextFirnd) -> io::Result<Option<Pid>> {
        self.keep_descriptor(Tag::UpgradeReport, next.report.as_fd())?;
        self.keep_descriptor(Tag::NextRequest, next.request.as_fd())?;
        // The upgrade begins for the keeper with this descriptor, so it is sent last.
        self.keep_descriptor(Tag::NextProgram, next.program.as_fd())?;
        Ok(self.state.lock().keeper)
    }

    /// Makes the keeper kill firnd if `probe` does not return within `limit`.
    pub(crate) fn watch_hangs(&self, limit: Duration, probe: Probe) {
        *self.probe.lock() = Some(probe);
        let mut state = self.state.lock();
        state.watchdog = limit;
        if let DescriptorHolder::Keeper(socket) = &state.holder {
            let _ = socket.send_watch_limit(limit);
        }
    }

    /// Runs the probe and answers the ping. While firnd hangs, the probe does not return and no answer is sent.
    fn answer_ping(&self, socket: &Socket) {
        let probe = self.probe.lock().clone();
        if let Some(probe) = probe {
            probe();
        }
        let _ = socket.send_pong();
    }

    /// Tells the keeper that programs see the mount.
    pub(crate) fn notify_serving(&self) {
        let _ = match &self.state.lock().holder {
            DescriptorHolder::Keeper(socket) => socket.notify_serving(),
            DescriptorHolder::ServiceManager(manager) => manager.notify_serving(),
        };
    }

    /// Tells the keeper that the mount ends or cannot be taken over, so it must start no other firnd.
    pub(crate) fn notify_ending(&self) {
        let mut state = self.state.lock();
        state.is_ending = true;
        match &state.holder {
            DescriptorHolder::Keeper(socket) => drop(socket.notify_ending()),
            DescriptorHolder::ServiceManager(manager) => {
                let _ = manager.notify_ending();
                for kept in &state.kept {
                    let _ = manager.remove(kept.label);
                }
                abort_connection(&state.kept);
            }
        }
    }

    /// Starts the thread that answers pings, and starts another keeper when the current one dies.
    pub(crate) fn watch(self: &Arc<Self>) -> io::Result<()> {
        let link = Arc::clone(self);
        let watch = move || {
            while let Some(socket) = link.socket_to_watch() {
                while let Ok(Some(message)) = socket.receive() {
                    if matches!(message, Message::Ping) {
                        link.answer_ping(&socket);
                    }
                }
                link.replace_keeper();
            }
        };
        spawn_thread("firn-keeper", watch)
    }

    /// Returns the socket of the keeper; `None` if the mount ends, too many keepers have died, or a service manager has
    /// the keeper's place.
    fn socket_to_watch(&self) -> Option<Arc<Socket>> {
        let state = self.state.lock();
        match &state.holder {
            DescriptorHolder::Keeper(socket)
                if !state.is_ending && state.keepers_started < KEEPERS_MAX =>
            {
                Some(Arc::clone(socket))
            }
            DescriptorHolder::Keeper(_) | DescriptorHolder::ServiceManager(_) => None,
        }
    }

    /// Starts another keeper after the last one was killed. A keeper holds copies of this process's descriptors, and
    /// starts the next serving process when this one dies. If that fails, no more keepers are started.
    fn replace_keeper(&self) {
        let mut state = self.state.lock();
        if state.is_ending {
            return;
        }
        state.keepers_started += 1;
        match start_keeper(&state.kept) {
            Ok(StartedKeeper { socket, pid }) => {
                // If the new keeper has died too, the thread that watches it sees that.
                let _ = socket.send_watch_limit(state.watchdog);
                state.holder = DescriptorHolder::Keeper(Arc::new(socket));
                state.keeper = Some(pid);
                tracing::warn!(
                    "firn-keeper, which restarts firnd, was killed; another one has taken its place"
                );
            }
            Err(error) => {
                state.keepers_started = KEEPERS_MAX;
                tracing::error!(%error, "firn-keeper, which restarts firnd, was killed, and another one cannot be \
                    started: if firnd dies, programs lose the mount");
            }
        }
    }
}

impl FileKeeper for KeeperLink {
    fn keep_file(&self, node: InodeId, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.keep_descriptor(nameless_file_label(node), descriptor)
    }

    fn drop_file(&self, node: InodeId) {
        self.drop_descriptor(nameless_file_label(node));
    }
}

fn nameless_file_label(node: InodeId) -> Label {
    Label {
        tag: Tag::NamelessFile,
        number: node.0,
    }
}

/// Copies the descriptor with a tag that at most one descriptor has; `None` if none has it.
fn copy_descriptor(kept: &[KeptDescriptor], tag: Tag) -> io::Result<Option<OwnedFd>> {
    let with_tag = kept.iter().find(|kept| kept.label.tag == tag);
    with_tag.map(|kept| kept.descriptor.try_clone()).transpose()
}

/// A keeper that was just started: firnd's end of its socket, and its process number.
struct StartedKeeper {
    socket: Socket,
    pid: Pid,
}

/// Starts a keeper, which starts the next firnd when this one dies, and gives it the descriptors of the mount and a
/// pidfd of this process. The pidfd comes last and ends the list.
fn start_keeper(kept: &[KeptDescriptor]) -> io::Result<StartedKeeper> {
    let (firnd_socket, keeper_socket) = Socket::pair()?;
    firnd_socket.limit_waits(SEND_TIMEOUT)?;
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0(KEEPER_NAME)
        .arg(REPLACES)
        .stdin(keeper_socket.into_stdio());
    let mut keeper = command.spawn()?;
    // The command holds the keeper's end of the socket. It is closed so that this process sees the keeper's death.
    drop(command);
    for KeptDescriptor { label, descriptor } in kept {
        firnd_socket.send_descriptor(*label, descriptor)?;
    }
    let own_pidfd = pidfd_open(getpid(), PidfdFlags::empty())?;
    firnd_socket.send_descriptor(Tag::Firnd.into(), &own_pidfd)?;
    let pid = Pid::from_child(&keeper);
    // The keeper's death is seen at the socket. This thread only removes the zombie.
    let reap = move || {
        let _ = keeper.wait();
    };
    spawn_thread("firn-reaper", reap)?;
    Ok(StartedKeeper {
        socket: firnd_socket,
        pid,
    })
}
