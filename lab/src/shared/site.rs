//! Where the clients write: each has a directory of its own, which is the same one.

use std::path::{Path, PathBuf};

use crate::serve::{Model, Mounted, Server, client_point, delays};
use firn_bench::durable;
use firn_bench::firn::Firn;
use firn_bench::machine;
use firn_bench::options::WorkDir;
use firn_testfs::moosefs::{self, MooseFs};

/// What is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum On {
    /// The file system of --dir.
    Local,
    /// The model of a disk behind a server that syncs each write.
    Disk,
    /// The model of a disk behind a server with a cache of 256 MiB.
    CachedDisk,
    /// The model of a server with locks on extents.
    Locks,
    /// Two lanes, each the model of a disk: only flattening.
    Lanes,
    /// The file system of --dir, all clients on one host: one file, and a file for each.
    OneHost,
    /// No rates: the sizes of indexes by the pattern in which 8 clients write.
    Index,
    /// MooseFS, a master and two chunk servers on this machine, a mount for each client (root only).
    Moosefs,
}

impl On {
    /// What is quick, and needs neither root nor packages.
    pub const DEFAULT: [Self; 6] = [
        Self::Local,
        Self::Disk,
        Self::Locks,
        Self::Lanes,
        Self::OneHost,
        Self::Index,
    ];

    /// Whether something is measured without Firn.
    pub fn has_baseline(self) -> bool {
        !matches!(self, Self::Lanes | Self::Index)
    }

    pub fn is_model(self) -> bool {
        self.model().is_some()
    }

    /// What times and sizes of a full run are divided by. With locks it is not needed, and what Firn and the servers cost
    /// would count as often.
    pub fn divisor(self) -> u32 {
        match self {
            Self::Disk | Self::CachedDisk | Self::Lanes => 4,
            Self::Local | Self::Locks | Self::Moosefs | Self::OneHost | Self::Index => 1,
        }
    }

    fn model(self) -> Option<Model> {
        match self {
            Self::Disk => Some(Model::SyncedDisk),
            Self::CachedDisk => Some(Model::CachedDisk),
            Self::Locks => Some(Model::ExtentLocks),
            Self::Local | Self::Lanes | Self::Moosefs | Self::OneHost | Self::Index => None,
        }
    }

    /// As pictures and goals call it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Disk => "model of a synced disk",
            Self::CachedDisk => "model of a cached disk",
            Self::Locks => "model of extent locks",
            Self::Lanes => "two lanes",
            Self::OneHost => "one host",
            Self::Index => "index",
            Self::Moosefs => "MooseFS",
        }
    }
}

/// A file system with a mount for each client.
pub struct Site {
    on: On,
    /// Where each client has it.
    tops: Vec<PathBuf>,
    /// Where each client works: [`Site::begin_run`].
    dirs: Vec<PathBuf>,
    /// Runs so far.
    runs: u32,
    divisor: u32,
    note: String,
    model: Option<Mounted>,
    moosefs: Option<MooseFs>,
    /// What the model keeps in memory.
    source: Option<PathBuf>,
}

impl Site {
    /// Starts it for `clients` clients, inside `work`.
    pub fn start(
        on: On,
        clients: u32,
        divisor: u32,
        work: &WorkDir,
        firn: &Firn,
    ) -> anyhow::Result<Self> {
        let mut site = Self {
            on,
            tops: Vec::new(),
            dirs: Vec::new(),
            runs: 0,
            divisor,
            note: String::new(),
            model: None,
            moosefs: None,
            source: None,
        };
        site.tops = match (on, on.model()) {
            (_, Some(model)) => site.start_model(model, clients, work, firn)?,
            (On::Moosefs, _) => site.start_moosefs(clients, work)?,
            _ => {
                site.note = format!("local: {}", machine::file_system_of(work.path()));
                vec![work.subdir("local")?; clients as usize]
            }
        };
        Ok(site)
    }

    fn start_model(
        &mut self,
        model: Model,
        clients: u32,
        work: &WorkDir,
        firn: &Firn,
    ) -> anyhow::Result<Vec<PathBuf>> {
        let source = firn.memory_dir()?.join("model");
        std::fs::create_dir_all(&source)?;
        self.source = Some(source.clone());
        let top = work.subdir("model")?;
        let points: Vec<PathBuf> = (0..clients)
            .map(|client| client_point(&top, client))
            .collect();
        points.iter().try_for_each(std::fs::create_dir_all)?;
        let server = Server::Clients {
            source,
            model,
            divisor: self.divisor,
            clients,
        };
        self.model = Some(Mounted::start(&server, &top)?);
        let what = match model {
            Model::SyncedDisk => {
                "a SATA disk of 2010 (8.5 ms a seek, 80 MB/s) whose server syncs each write"
            }
            Model::CachedDisk => {
                "a SATA disk of 2010 (8.5 ms a seek, 80 MB/s, 256 MiB of write-back cache)"
            }
            Model::ExtentLocks => {
                "a server with locks on 1 MiB of a file, 2 ms for each change of the owner"
            }
        };
        let scale = match self.divisor {
            1 => String::new(),
            divisor => format!("; times and sizes divided by {divisor}, shown at full scale"),
        };
        self.note = format!("{}: a MODEL of {what}{scale}", self.on.title());
        Ok(points)
    }

    fn start_moosefs(&mut self, clients: u32, work: &WorkDir) -> anyhow::Result<Vec<PathBuf>> {
        let servers = [moosefs::Server::default(); 2];
        let mut moosefs = MooseFs::start(work.path(), &servers)?;
        let mut points = vec![moosefs.point().to_owned()];
        for client in 1..clients {
            points.push(moosefs.mount_for(&work.subdir(&format!("moosefs-client{client}"))?)?);
        }
        self.moosefs = Some(moosefs);
        self.note = "MooseFS: a master and 2 chunk servers on this machine, one copy, a mount for each client".into();
        Ok(points)
    }

    /// The directory of a client.
    pub fn dir(&self, client: u32) -> &Path {
        &self.dirs[client as usize]
    }

    /// Whether all clients have one mount of it.
    pub fn has_one_mount(&self) -> bool {
        self.on == On::Local
    }

    /// What a reader must know.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// As pictures and goals call it.
    pub fn title(&self) -> &'static str {
        self.on.title()
    }

    /// Whether reading says anything: the models of disks have no cache of what was read or written for readers.
    pub fn has_reads(&self) -> bool {
        !matches!(self.on, On::Disk | On::CachedDisk)
    }

    /// A size of full scale, here.
    pub fn scaled(&self, bytes: u64) -> u64 {
        (bytes / u64::from(self.divisor)).max(1)
    }

    /// A time of here, at full scale.
    pub fn at_full_scale(&self, seconds: f64) -> f64 {
        seconds * f64::from(self.divisor)
    }

    /// Seeks, or changes of the owners of locks, so far; none without a model.
    pub fn delays(&mut self) -> anyhow::Result<u64> {
        self.model.as_mut().map_or(Ok(0), delays)
    }

    /// Removes what was written, so that the next one does not pay for it, and makes a directory that no client knows:
    /// clients that remember a name would take a directory of that name for the old one.
    pub fn begin_run(&mut self) -> anyhow::Result<()> {
        if let Some(dir) = self.dirs.first() {
            std::fs::remove_dir_all(dir)?;
        }
        self.runs += 1;
        let name = format!("run{}", self.runs);
        self.dirs = self.tops.iter().map(|top| top.join(&name)).collect();
        std::fs::create_dir(&self.dirs[0])?;
        match self.on {
            On::Local => durable::sync_all(&self.dirs[0]),
            _ => Ok(()),
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.model = None;
        self.moosefs = None;
        if let Some(source) = &self.source {
            let _ = std::fs::remove_dir_all(source);
        }
    }
}
