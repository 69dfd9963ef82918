//! Three lanes on file systems of their own: ext4, which has the backing as well, xfs and tmpfs.

use std::path::{Path, PathBuf};

use crate::image::{FsKind, LoopImage};
use crate::sandbox::Sandbox;

/// A backing and lanes for it.
pub struct LaneImages {
    images: Vec<LoopImage>,
    lanes: Vec<PathBuf>,
    backing: PathBuf,
}

impl LaneImages {
    /// Makes and mounts them.
    pub fn new(sandbox: &Sandbox) -> Self {
        let kinds = [FsKind::Ext4, FsKind::Xfs, FsKind::Tmpfs];
        let images = kinds.map(|kind| LoopImage::new(sandbox, kind, 400));
        Self {
            lanes: images.iter().map(|image| image.mkdir("lane")).collect(),
            backing: images[0].mkdir("backing"),
            images: images.into(),
        }
    }

    /// The directory that has the names.
    pub fn backing(&self) -> &Path {
        &self.backing
    }

    /// The file system of the lane with this number.
    pub fn image(&self, number: usize) -> &LoopImage {
        &self.images[number]
    }

    /// The lanes.
    pub fn lanes(&self) -> &[PathBuf] {
        &self.lanes
    }

    /// Mount options that place files in them, and `extra`.
    pub fn options(&self, extra: &str) -> String {
        place_in(&self.lanes, extra)
    }
}

/// Mount options that place files in these directories, and `extra`.
pub fn place_in(lanes: &[impl AsRef<Path>], extra: &str) -> String {
    let lanes: Vec<_> = lanes
        .iter()
        .map(|lane| lane.as_ref().display().to_string())
        .collect();
    let comma = if extra.is_empty() { "" } else { "," };
    format!("placement=dirs,lanes={}{comma}{extra}", lanes.join(":"))
}
