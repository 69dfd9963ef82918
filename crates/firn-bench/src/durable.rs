//! What a job does natively to have its files for certain.

use std::fs::File;
use std::path::{Path, PathBuf};

/// fsync of all `files` at once, then of the directory that has their names.
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

/// syncfs of the file system that `dir` is on.
pub fn sync_all(dir: &Path) -> anyhow::Result<()> {
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}
