//! firnd's end of the connection with its keeper: gives it descriptors, answers its pings, and replaces it if it dies.
//! A service manager can have the keeper's place.
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

use firn_engine::{FileKeeper, InodeId, KeptFile};
use firn_hosts::KeptLockFile;
use firn_workers::spawn_thread;
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, getpid, getppid, pidfd_open};

use super::message::{KeptDescriptor, Label, LastUpgrade, Message, Socket, Tag, uptime};
use super::service_manager::{self, ServiceManager};
use super::{KEEPER_NAME, REPLACES, abort_connection};
use crate::spawn::read_failure;

/// Limit of keepers that firnd starts: a host that kills each of them does not want one.
const KEEPERS_MAX: u32 = 20;

/// Timeout for a message to a stopped keeper. The removal of an open file's name waits for such a message; after the
/// timeout the keeper does not get the file.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// What firnd gets from its keeper at its start.
pub(crate) struct Summons {
    /// The connection with the keeper.
    pub(crate) link: Arc<KeeperLink>,
    /// The process whose end ends the mount, if there is one.
    pub(crate) caller: Option<OwnedFd>,
    /// The mount that an earlier firnd served, if this firnd takes it over.
    pub(crate) resumed: Option<ResumedMount>,
}

/// A mount whose firnd died.
pub(crate) struct ResumedMount {
    /// The connection to the kernel; `None` for a stub tree.
    pub(crate) device: Option<OwnedFd>,
    /// When the death of the earlier firnd was seen, as time since the boot.
    pub(crate) died: Duration,
    /// Open files that have no name any more.
    pub(crate) files: Vec<KeptFile>,
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
enum Holder {
    Keeper(Arc<Socket>),
    ServiceManager(Arc<ServiceManager>),
}

impl Holder {
    fn keep(&self, label: Label, descriptor: &OwnedFd) -> io::Result<()> {
        match self {
            Self::Keeper(socket) => socket.send(label, descriptor),
            Self::ServiceManager(manager) => manager.store(label, descriptor.as_fd()),
        }
    }

    fn drop_kept(&self, label: Label) -> io::Result<()> {
        match self {
            Self::Keeper(socket) => socket.drop_kept(label),
            Self::ServiceManager(manager) => manager.remove(label),
        }
    }
}

struct LinkState {
    holder: Holder,
    /// The descriptors that the keeper has, for another keeper.
    kept: Vec<KeptDescriptor>,
    is_ending: bool,
    started: u32,
    /// Process number of the keeper.
    keeper: Option<Pid>,
    /// Time in which firnd must answer a ping; 0 if the keeper does not ping.
    watchdog: Duration,
}

impl Summons {
    /// Receives what the keeper at the other end of stdin has for this firnd.
    pub(crate) fn receive() -> io::Result<Self> {
        let socket = Socket::new(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
        socket.limit_waits(SEND_TIMEOUT)?;
        let mut kept = Vec::new();
        let (died, upgrade) = loop {
            match socket.receive()? {
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(Message::Keep(given)) => kept.push(given),
                Some(Message::Begin { died, upgrade }) => break (died, upgrade),
                Some(_) => {}
            }
        };
        let caller = copy_descriptor(&kept, Tag::Caller)?;
        let last_upgrade = match upgrade {
            LastUpgrade::None => String::new(),
            LastUpgrade::Done => "done".into(),
            LastUpgrade::Refused => {
                let report = copy_descriptor(&kept, Tag::UpgradeReport)?;
                match report.and_then(read_failure) {
                    Some(why) => format!("refused: {why}"),
                    None => "refused: the new firnd ended without a reason".into(),
                }
            }
        };
        let resumed = died.map(|died| ResumedMount::of(&kept, died)).transpose()?;
        let holder = Holder::Keeper(Arc::new(socket));
        Ok(Self {
            link: KeeperLink::new(holder, kept, last_upgrade),
            caller,
            resumed,
        })
    }

    /// Finds a service manager that holds the descriptors of this mount; `None` if there is none. If they include the
    /// connection of the mount, this firnd takes the mount over.
    pub(crate) fn from_service_manager() -> io::Result<Option<Self>> {
        let Some(manager) = ServiceManager::find(SEND_TIMEOUT)? else {
            return Ok(None);
        };
        let mut kept = service_manager::take_stored();
        let resumed = if kept.iter().any(|kept| kept.label.tag == Tag::Device) {
            // When the earlier firnd died is unknown. With a later time, more programs count as affected.
            Some(ResumedMount::of(&kept, uptime())?)
        } else {
            // The mount of these descriptors never began, or has ended: its locks must not stay.
            for left in kept.drain(..) {
                manager.remove(left.label)?;
            }
            None
        };
        let holder = Holder::ServiceManager(Arc::new(manager));
        Ok(Some(Self {
            link: KeeperLink::new(holder, kept, String::new()),
            caller: None,
            resumed,
        }))
    }
}

impl ResumedMount {
    /// Returns the mount to which kept descriptors belong.
    fn of(kept: &[KeptDescriptor], died: Duration) -> io::Result<Self> {
        let device = copy_descriptor(kept, Tag::Device)?;
        let files = copy_descriptors(kept, Tag::NamelessFile)?.into_iter();
        let files = files.map(|(number, descriptor)| KeptFile {
            node: InodeId(number),
            descriptor,
        });
        let lock_files = copy_descriptors(kept, Tag::LockFile)?.into_iter();
        let lock_files = lock_files.map(|(ino, descriptor)| KeptLockFile { ino, descriptor });
        Ok(Self {
            device,
            died,
            files: files.collect(),
            lock_files: lock_files.collect(),
        })
    }
}

impl fmt::Debug for KeeperLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeeperLink").finish_non_exhaustive()
    }
}

impl KeeperLink {
    fn new(holder: Holder, kept: Vec<KeptDescriptor>, last_upgrade: String) -> Arc<Self> {
        let state = LinkState {
            holder,
            kept,
            is_ending: false,
            started: 0,
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
    pub(crate) fn find_kept(&self, tag: Tag) -> io::Result<Option<OwnedFd>> {
        copy_descriptor(&self.state.lock().kept, tag)
    }

    /// Returns whether a service manager has the keeper's place.
    pub(crate) fn is_to_service_manager(&self) -> bool {
        matches!(self.state.lock().holder, Holder::ServiceManager(_))
    }

    /// Gives the keeper a descriptor to hold. An error means that this keeper did not get it; a later keeper does.
    pub(crate) fn keep(
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
        let sent = state.holder.keep(label, &descriptor);
        state.kept.retain(|kept| kept.label != label);
        state.kept.push(KeptDescriptor { label, descriptor });
        sent
    }

    /// Makes the keeper close the descriptor with this label.
    pub(crate) fn drop_kept(&self, label: Label) {
        let mut state = self.state.lock();
        // After a failure the keeper is dead, and the next keeper does not get the descriptor.
        let _ = state.holder.drop_kept(label);
        state.kept.retain(|kept| kept.label != label);
    }

    /// Gives the keeper the connection of the mount. From now on another firnd can take the mount over.
    pub(crate) fn keep_mount(
        &self,
        device: Option<BorrowedFd<'_>>,
        control: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        if let Some(device) = device {
            self.keep(Tag::Device, device)?;
        }
        if let Some(control) = control {
            self.keep(Tag::Control, control)?;
        }
        let null = std::fs::File::open("/dev/null")?;
        self.keep(Tag::CanBeTakenOver, null.as_fd())
    }

    /// Gives the keeper the log, which is standard error. A firnd that cannot take the mount over writes the reason
    /// there.
    pub(crate) fn keep_log(&self) {
        if let Err(error) = self.keep(Tag::Log, rustix::stdio::stderr()) {
            tracing::warn!(%error, "the keeper does not answer");
        }
    }

    /// Gives the keeper the program to start when this firnd dies. Returns the process number of the keeper.
    pub(crate) fn keep_next(&self, next: &NextFirnd) -> io::Result<Option<Pid>> {
        self.keep(Tag::UpgradeReport, next.report.as_fd())?;
        self.keep(Tag::NextRequest, next.request.as_fd())?;
        // The upgrade begins for the keeper with this descriptor, so it is sent last.
        self.keep(Tag::NextProgram, next.program.as_fd())?;
        Ok(self.state.lock().keeper)
    }

    /// Makes the keeper kill firnd if `probe` does not return within `limit`.
    pub(crate) fn watch_hangs(&self, limit: Duration, probe: Probe) {
        *self.probe.lock() = Some(probe);
        let mut state = self.state.lock();
        state.watchdog = limit;
        if let Holder::Keeper(socket) = &state.holder {
            let _ = socket.say_watch(limit);
        }
    }

    /// Runs the probe and answers the ping. While firnd hangs, the probe does not return and no answer is sent.
    fn answer_ping(&self, socket: &Socket) {
        let probe = self.probe.lock().clone();
        if let Some(probe) = probe {
            probe();
        }
        let _ = socket.say_pong();
    }

    /// Tells the keeper that programs see the mount.
    pub(crate) fn say_serving(&self) {
        let _ = match &self.state.lock().holder {
            Holder::Keeper(socket) => socket.say_serving(),
            Holder::ServiceManager(manager) => manager.say_serving(),
        };
    }

    /// Tells the keeper that the mount ends or cannot be taken over, so it must start no other firnd.
    pub(crate) fn say_ending(&self) {
        let mut state = self.state.lock();
        state.is_ending = true;
        match &state.holder {
            Holder::Keeper(socket) => drop(socket.say_ending()),
            Holder::ServiceManager(manager) => {
                let _ = manager.say_ending();
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

    /// Returns the socket of the keeper; `None` if the mount ends, too many keepers have died, or a service manager has the
    /// keeper's place.
    fn socket_to_watch(&self) -> Option<Arc<Socket>> {
        let state = self.state.lock();
        match &state.holder {
            Holder::Keeper(socket) if !state.is_ending && state.started < KEEPERS_MAX => {
                Some(Arc::clone(socket))
            }
            Holder::Keeper(_) | Holder::ServiceManager(_) => None,
        }
    }

    /// Starts another keeper. If that fails, no more keepers are started.
    fn replace_keeper(&self) {
        let mut state = self.state.lock();
        if state.is_ending {
            return;
        }
        state.started += 1;
        match start_keeper(&state.kept) {
            Ok(StartedKeeper { socket, keeper }) => {
                let _ = socket.say_watch(state.watchdog);
                state.holder = Holder::Keeper(Arc::new(socket));
                state.keeper = Some(keeper);
                tracing::warn!("the keeper of the mount was killed; another one has its place");
            }
            Err(error) => {
                state.started = KEEPERS_MAX;
                tracing::error!(%error, "the keeper of the mount was killed, and no other one can be started: if firnd dies, programs lose the mount");
            }
        }
    }
}

impl FileKeeper for KeeperLink {
    fn keep_file(&self, node: InodeId, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.keep(label_of_file(node), descriptor)
    }

    fn drop_file(&self, node: InodeId) {
        self.drop_kept(label_of_file(node));
    }
}

fn label_of_file(node: InodeId) -> Label {
    Label {
        tag: Tag::NamelessFile,
        number: node.0,
    }
}

/// Copies the descriptor with a tag of which there is one at most.
fn copy_descriptor(kept: &[KeptDescriptor], tag: Tag) -> io::Result<Option<OwnedFd>> {
    let found = kept.iter().find(|kept| kept.label.tag == tag);
    found.map(|kept| kept.descriptor.try_clone()).transpose()
}

/// Copies the descriptors with a tag. Returns them with the numbers of their labels.
fn copy_descriptors(kept: &[KeptDescriptor], tag: Tag) -> io::Result<Vec<(u64, OwnedFd)>> {
    let tagged = kept.iter().filter(|kept| kept.label.tag == tag);
    let copies = tagged.map(|kept| Ok((kept.label.number, kept.descriptor.try_clone()?)));
    copies.collect()
}

struct StartedKeeper {
    socket: Socket,
    keeper: Pid,
}

/// Starts a keeper and gives it the descriptors and a pidfd of this process.
fn start_keeper(kept: &[KeptDescriptor]) -> io::Result<StartedKeeper> {
    let (ours, theirs) = Socket::pair()?;
    ours.limit_waits(SEND_TIMEOUT)?;
    let mut keeper = Command::new("/proc/self/exe");
    keeper
        .arg0(KEEPER_NAME)
        .arg(REPLACES)
        .stdin(theirs.into_stdio());
    let mut child = keeper.spawn()?;
    // The command holds the keeper's end of the socket. It is closed so that this process sees the keeper's death.
    drop(keeper);
    for kept in kept {
        ours.send(kept.label, &kept.descriptor)?;
    }
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    ours.send(Tag::Firnd.into(), &this)?;
    let keeper = Pid::from_child(&child);
    // The keeper's death is seen at the socket. This thread only removes the zombie.
    let reap = move || {
        let _ = child.wait();
    };
    spawn_thread("firn-reaper", reap)?;
    Ok(StartedKeeper {
        socket: ours,
        keeper,
    })
}
