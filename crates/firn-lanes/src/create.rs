//! A new file: first in its lane, then under a name.

use super::*;

/// Bytes of a file's name that its entry in the lane repeats, for people who look there.
const NAME_BYTES: usize = 200;

impl<B: Backing> Lanes<B> {
    /// [`Backing::create`], in a lane.
    pub(crate) fn create_placed(
        &self,
        caller: &Caller,
        parent: &B::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(LanesInode<B>, LanesFile<B>, Attr)> {
        let (number, _) = self.rule.choose(name);
        let lane = &self.lanes[number];
        let owner = self.owner_in(parent, caller)?;
        let entry = new_entry(name)?;
        let target = lane.target_of(&entry);
        // The link first: from it the next mount finds the file, should this be cut off.
        let (link, link_attr) = self
            .primary
            .symlink(&owner, &self.staging, &entry, &target)?;
        let made = self.make_file(lane, &entry, &owner, mode, self.mark_of(&link_attr));
        let named = made.and_then(|made| {
            self.give_name(&link, &entry, parent, name)?;
            Ok((made, self.primary.attr(&link)?))
        });
        let ((file_inode, file), link_attr) = named.inspect_err(|_| {
            let _ = self.remove_entry(number, &entry);
            let _ = self.primary.unlink(&self.staging, &entry);
        })?;
        let placed = Arc::new(PlacedFile {
            link,
            lane: number,
            entry,
            file: file_inode,
        });
        let attr = placed_attr(&link_attr, &lane.backing.attr_of_file(&file)?);
        let opened = LanesFile {
            file,
            placed: Some(Arc::clone(&placed)),
        };
        Ok((LanesInode::Placed(placed), opened, attr))
    }

    /// The file in its lane, marked as that of its link.
    fn make_file(
        &self,
        lane: &Lane<B>,
        entry: &OsStr,
        owner: &Caller,
        mode: u32,
        mark: Mark,
    ) -> Result<(B::Inode, B::File)> {
        let root = lane.backing.root();
        let (inode, file, _) = lane.backing.create(owner, &root, entry, mode)?;
        lane.note_change();
        mark::write(&lane.backing, &inode, mark)?;
        Ok((inode, file))
    }

    fn give_name(
        &self,
        link: &B::Inode,
        entry: &OsStr,
        parent: &B::Inode,
        name: &OsStr,
    ) -> Result<()> {
        let flags = RenameFlags::NOREPLACE;
        match self
            .primary
            .rename(&self.staging, entry, parent, name, flags)
        {
            // A file system, such as NFS, that cannot rename like this.
            Err(Errno::INVAL) => {
                self.primary.link(link, parent, name)?;
                self.primary.unlink(&self.staging, entry)
            }
            done => done,
        }
    }

    /// Owner of what `caller` makes in `parent`: the link is made elsewhere, where the kernel cannot know of it.
    fn owner_in(&self, parent: &B::Inode, caller: &Caller) -> Result<Caller> {
        let attr = self.primary.attr(parent)?;
        if attr.kind != Kind::Dir {
            return Err(Errno::NOTDIR);
        }
        let takes_group = attr.mode & libc::S_ISGID != 0;
        Ok(Caller {
            gid: if takes_group { attr.gid } else { caller.gid },
            ..*caller
        })
    }
}

/// A name for a new file in a lane: unlike any other, and told from its name above.
fn new_entry(name: &OsStr) -> Result<OsString> {
    let bytes = name.as_bytes();
    let mut entry = OsStr::from_bytes(&bytes[..bytes.len().min(NAME_BYTES)]).to_owned();
    let id = getrandom::u64().map_err(|_| Errno::IO)?;
    entry.push(format!(".{id:016x}"));
    Ok(entry)
}

/// Whether an entry of a lane has the form that [`new_entry`] gives it.
pub(crate) fn is_entry(entry: &OsStr) -> bool {
    let id = entry.as_bytes().rsplit(|&byte| byte == b'.').next();
    entry.as_bytes().contains(&b'.')
        && id.is_some_and(|id| id.len() == 16 && id.iter().all(u8::is_ascii_hexdigit))
}
