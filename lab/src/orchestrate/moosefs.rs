//! The same on a real distributed file system: MooseFS on this machine, whose chunk servers get a limited number of
//! bytes a second. It keeps each chunk of 64 MiB whole on a server, and gives the next chunk to the next server.

use std::path::PathBuf;

use firn_testfs::cleanup::{Guard, Leftover, expect};
use firn_testfs::moosefs::{MooseFs, Server};

use super::candidate::{ARENA_BYTES_MIN, Candidate, Site, Way, Written, name_of};
use firn_bench::durable;
use firn_bench::report::Sample;
use firn_bench::worker::{self, Task};

/// The chunk servers, by their labels.
const LABELS: [char; 4] = ['A', 'B', 'C', 'D'];
/// The storage class of one copy on any server.
const ANY: &str = "any";
/// Bytes of one write.
const WRITE_BYTES: u64 = 1 << 20;

/// A checkpoint of `processes` processes.
#[derive(Clone, Copy, Debug)]
pub struct MooseFsCheckpoint {
    pub processes: u64,
    pub image_bytes: u64,
    pub server_bytes_per_s: u64,
}

impl MooseFsCheckpoint {
    /// Writes it once, to a MooseFS of its own. It is durable when all chunk servers have it, which sync nothing.
    pub fn write(&self, candidate: &Candidate, site: &Site<'_>) -> anyhow::Result<Sample> {
        let cluster = Cluster::start(site)?;
        cluster.moosefs.limit_servers(self.server_bytes_per_s)?;
        let written = match candidate.way {
            Way::Firn(options) => self.write_by_firn(options, &cluster, site)?,
            way => {
                let dirs = cluster.dirs(way)?;
                let tasks = self.tasks(&dirs);
                let outcomes = worker::run_with(None, &tasks)?;
                let paths: Vec<PathBuf> = self.paths(&dirs).collect();
                durable::sync_files(paths.iter().map(PathBuf::as_path), &dirs[0])?;
                Written::now(&outcomes)
            }
        };
        Ok(vec![
            ("durable", "s", written.durable.as_secs_f64()),
            ("of the bytes' time", "", self.of_bytes_time(&written)),
            ("closed", "s", written.closed.as_secs_f64()),
        ])
    }

    fn write_by_firn(
        &self,
        options: &str,
        cluster: &Cluster,
        site: &Site<'_>,
    ) -> anyhow::Result<Written> {
        let point = site.work.subdir("firn")?;
        let classes = LABELS.map(class_of).join(":");
        let options = format!(
            "close=held,fsync=held,arena-size={ARENA_BYTES_MIN},placement=moosefs,servers={classes}{options}"
        );
        let backing = cluster.dir("run")?;
        let mount = site.firn.mount(&backing, &point, &options)?;
        mount.wait_populated()?;
        let tasks = self.tasks(&[mount.path().to_owned()]);
        let outcomes = worker::run_with(Some(&site.firn.preload()?), &tasks)?;
        mount.wait_durable(mount.path())?;
        Ok(Written::now(&outcomes))
    }

    /// A file for each process, in the directories in turn.
    fn paths<'a>(&self, dirs: &'a [PathBuf]) -> impl Iterator<Item = PathBuf> + use<'a> {
        let path = |rank: u64| dirs[rank as usize % dirs.len()].join(name_of(rank));
        (0..self.processes).map(path)
    }

    fn tasks(&self, dirs: &[PathBuf]) -> Vec<Task> {
        let write = |path| Task::Write {
            path,
            runs: vec![(self.image_bytes / WRITE_BYTES, WRITE_BYTES)],
            sync: false,
            over: false,
        };
        self.paths(dirs).map(write).collect()
    }

    /// To the time of all bytes at what the chunk servers get together.
    fn of_bytes_time(&self, written: &Written) -> f64 {
        let bytes = self.processes * self.image_bytes;
        let rate = self.server_bytes_per_s * LABELS.len() as u64;
        written.durable.as_secs_f64() * rate as f64 / bytes as f64
    }
}

/// A MooseFS with a storage class for each of its chunk servers. What was written goes with it.
struct Cluster {
    moosefs: MooseFs,
    /// Removed when its servers have ended.
    _dirs: Vec<Guard>,
}

impl Cluster {
    fn start(site: &Site<'_>) -> anyhow::Result<Self> {
        let disks = LABELS.map(|label| site.memory.join(format!("chunks-{label}")));
        let work = site.work.subdir("cluster")?;
        let mut dirs = vec![expect(Leftover::Dir(work.clone()))];
        for disk in &disks {
            dirs.push(expect(Leftover::Dir(disk.clone())));
            std::fs::create_dir_all(disk)?;
        }
        let servers = LABELS.iter().zip(&disks).map(|(label, disk)| Server {
            label: Some(*label),
            disk: Some(disk),
        });
        let cluster = Self {
            moosefs: MooseFs::start(&work, &servers.collect::<Vec<_>>())?,
            _dirs: dirs,
        };
        for label in LABELS {
            cluster.moosefs.make_class(&class_of(label), label)?;
        }
        cluster.moosefs.make_class(ANY, '*')?;
        Ok(cluster)
    }

    /// Where files are put: in one directory, or in one for each server.
    fn dirs(&self, way: Way) -> anyhow::Result<Vec<PathBuf>> {
        let dir_of_class = |class: &str| {
            let dir = self.dir(class)?;
            self.moosefs.set_class(class, &dir)?;
            Ok(dir)
        };
        match way {
            Way::Striped => Ok(vec![dir_of_class(ANY)?]),
            _ => LABELS
                .iter()
                .map(|label| dir_of_class(&class_of(*label)))
                .collect(),
        }
    }

    fn dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.moosefs.point().join(name);
        std::fs::create_dir(&dir)?;
        Ok(dir)
    }
}

fn class_of(label: char) -> String {
    format!("on_{label}")
}
