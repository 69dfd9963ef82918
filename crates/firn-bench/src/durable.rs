//! Makes files durable without Firn, as a job does on a native file system.

use std::fs::File;
use std::path::{Path, PathBuf};

/// Calls fsync(2) for all `files` in parallel, then for the directory that contains them.
pub fn sync_files<'a>(files: impl Iterator<Item = &'a Path>, dir: &Path) -> anyhow::Result<()> {
    let sync = |path: PathBuf| std::thread::spawn(move || File::open(path)?.sync_all());
    let threads: Vec<_> = files.map(|path| sync(path.to_owned())).collect();
    for thread in threads {
        thread.join().expect("fsync does not panic")?;
    }
    match File::open(dir)?.sync_all() {
        // sshfs knows no fsync of directories.
        Err(error) if error.raw_os_error() != Some(libc::ENOSYS) => Err(error.into()),
        _ => Ok(()),
    }
}

/// Calls syncfs(2) for the file system that `dir` is on.
pub fn sync_all(dir: &Path) -> anyhow::Result<()> {
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}
