//! firnd's end of its connection with the keeper.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use firn_engine::{FileKeeper, InodeId, KeptFile};
use firn_workers::spawn_thread;
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, getpid, getppid, pidfd_open};

use super::message::{Kept, Label, LastUpgrade, Message, Socket, Tag};
use super::{KEEPER_NAME, REPLACES};
use crate::spawn::read_failure;

/// Keepers that firnd starts at most: a host that kills each of them wants none.
const KEEPERS_MAX: u32 = 20;

/// How long a keeper that is stopped holds up the removal of an open file's name. The file is not kept then.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// What firnd was started with.
pub(crate) struct Summons {
    /// The keeper.
    pub(crate) link: Arc<KeeperLink>,
    /// The request, a file of JSON.
    pub(crate) request: OwnedFd,
    /// The process that ends the mount, if there is one.
    pub(crate) caller: Option<OwnedFd>,
    /// The mount that another firnd served.
    pub(crate) resumed: Option<ResumedMount>,
}

/// A mount whose firnd died.
pub(crate) struct ResumedMount {
    /// The connection to the kernel; none of a stub tree.
    pub(crate) device: Option<OwnedFd>,
    /// When its death was seen, since the host started.
    pub(crate) died: Duration,
    /// Open files without a name.
    pub(crate) files: Vec<KeptFile>,
}

/// The keeper, as firnd has it.
pub(crate) struct KeeperLink {
    state: Mutex<LinkState>,
    /// Returns where firnd goes on. None: it does not serve yet.
    probe: Mutex<Option<Probe>>,
    /// What became of the last upgrade of the mount, for the status.
    pub(crate) last_upgrade: String,
}

/// Takes what every request takes, and returns.
type Probe = Arc<dyn Fn() + Send + Sync>;

/// What an upgrade gives to the next firnd.
pub(crate) struct NextFirnd {
    pub(crate) program: OwnedFd,
    pub(crate) request: OwnedFd,
    /// An empty file, in which the next firnd tells why it does not serve.
    pub(crate) report: OwnedFd,
}

struct LinkState {
    socket: Arc<Socket>,
    /// What the keeper has, for another one.
    kept: Vec<Kept>,
    is_ending: bool,
    started: u32,
    /// The keeper's process.
    keeper: Option<Pid>,
    /// In which firnd must answer; 0: it is not asked.
    watchdog: Duration,
}

impl Summons {
    /// Takes what the keeper at the other end of stdin has for firnd.
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
        let copy_of = |tag: Tag| {
            let found = kept.iter().find(|kept| kept.label.tag == tag);
            found.map(|kept| kept.descriptor.try_clone()).transpose()
        };
        let request = copy_of(Tag::Request)?.ok_or(io::ErrorKind::InvalidData)?;
        let caller = copy_of(Tag::Caller)?;
        let device = copy_of(Tag::Device)?;
        let last_upgrade = match upgrade {
            LastUpgrade::None => String::new(),
            LastUpgrade::Done => "done".into(),
            LastUpgrade::Refused => match copy_of(Tag::UpgradeReport)?.and_then(read_failure) {
                Some(why) => format!("refused: {why}"),
                None => "refused: the new firnd ended and did not say why".into(),
            },
        };
        let files = copy_files(&kept)?;
        let resumed = died.map(|died| ResumedMount {
            device,
            died,
            files,
        });
        let state = LinkState {
            socket: Arc::new(socket),
            kept,
            is_ending: false,
            started: 0,
            keeper: getppid(),
            watchdog: Duration::ZERO,
        };
        Ok(Self {
            link: Arc::new(KeeperLink {
                state: Mutex::new(state),
                probe: Mutex::new(None),
                last_upgrade,
            }),
            request,
            caller,
            resumed,
        })
    }
}

impl KeeperLink {
    /// Has the keeper keep a descriptor. Returns whether it does.
    pub(crate) fn keep(
        &self,
        label: impl Into<Label>,
        descriptor: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let label = label.into();
        let descriptor = descriptor.try_clone_to_owned()?;
        let mut state = self.state.lock();
        let sent = state.socket.send(label, &descriptor);
        state.kept.retain(|kept| kept.label != label);
        state.kept.push(Kept { label, descriptor });
        sent
    }

    /// Another firnd can go on with the mount from now on.
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

    /// Gives the keeper the log, which is standard error: a firnd that cannot go on with the mount says why.
    pub(crate) fn keep_log(&self) {
        if let Err(error) = self.keep(Tag::Log, rustix::stdio::stderr()) {
            tracing::warn!(%error, "the keeper does not answer");
        }
    }

    /// Has the keeper start another program when this firnd dies. Gives the process of the keeper.
    pub(crate) fn keep_next(&self, next: &NextFirnd) -> io::Result<Option<Pid>> {
        self.keep(Tag::UpgradeReport, next.report.as_fd())?;
        self.keep(Tag::NextRequest, next.request.as_fd())?;
        // The keeper tries it from here on.
        self.keep(Tag::NextProgram, next.program.as_fd())?;
        Ok(self.state.lock().keeper)
    }

    /// Has the keeper kill firnd if `probe` does not return within `limit`.
    pub(crate) fn watch_hangs(&self, limit: Duration, probe: Probe) {
        *self.probe.lock() = Some(probe);
        let mut state = self.state.lock();
        state.watchdog = limit;
        let _ = state.socket.say_watch(limit);
    }

    fn answer_ping(&self, socket: &Socket) {
        let probe = self.probe.lock().clone();
        if let Some(probe) = probe {
            probe();
        }
        let _ = socket.say_pong();
    }

    /// Programs see the mount.
    pub(crate) fn say_serving(&self) {
        let _ = self.state.lock().socket.say_serving();
    }

    /// The mount ends, or cannot be gone on with: no other firnd is to be started.
    pub(crate) fn say_ending(&self) {
        let mut state = self.state.lock();
        state.is_ending = true;
        let _ = state.socket.say_ending();
    }

    /// Starts another keeper whenever there is none.
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

    fn socket_to_watch(&self) -> Option<Arc<Socket>> {
        let state = self.state.lock();
        (!state.is_ending && state.started < KEEPERS_MAX).then(|| Arc::clone(&state.socket))
    }

    fn replace_keeper(&self) {
        let mut state = self.state.lock();
        if state.is_ending {
            return;
        }
        state.started += 1;
        match start_keeper(&state.kept) {
            Ok(StartedKeeper { socket, keeper }) => {
                let _ = socket.say_watch(state.watchdog);
                state.socket = Arc::new(socket);
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
        let label = label_of_file(node);
        let mut state = self.state.lock();
        // A keeper that was killed is followed by one that does not get the file.
        let _ = state.socket.drop_kept(label);
        state.kept.retain(|kept| kept.label != label);
    }
}

fn label_of_file(node: InodeId) -> Label {
    Label {
        tag: Tag::NamelessFile,
        number: node.0,
    }
}

fn copy_files(kept: &[Kept]) -> io::Result<Vec<KeptFile>> {
    let files = kept
        .iter()
        .filter(|kept| kept.label.tag == Tag::NamelessFile);
    let copies = files.map(|kept| {
        Ok(KeptFile {
            node: InodeId(kept.label.number),
            descriptor: kept.descriptor.try_clone()?,
        })
    });
    copies.collect()
}

struct StartedKeeper {
    socket: Socket,
    keeper: Pid,
}

fn start_keeper(kept: &[Kept]) -> io::Result<StartedKeeper> {
    let (ours, theirs) = Socket::pair()?;
    ours.limit_waits(SEND_TIMEOUT)?;
    let mut keeper = Command::new("/proc/self/exe");
    keeper
        .arg0(KEEPER_NAME)
        .arg(REPLACES)
        .stdin(theirs.into_stdio());
    let mut child = keeper.spawn()?;
    // Its end of the socket, so that its death is seen here.
    drop(keeper);
    for kept in kept {
        ours.send(kept.label, &kept.descriptor)?;
    }
    let this = pidfd_open(getpid(), PidfdFlags::empty())?;
    ours.send(Tag::Firnd.into(), &this)?;
    let keeper = Pid::from_child(&child);
    // Its end is seen at the socket; this only takes it out of the table of processes.
    let reap = move || {
        let _ = child.wait();
    };
    spawn_thread("firn-reaper", reap)?;
    Ok(StartedKeeper {
        socket: ours,
        keeper,
    })
}
