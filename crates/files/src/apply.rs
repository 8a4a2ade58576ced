//! Applying changes on a spare, and telling the kernel what its caches no longer know.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use fuser::INodeNo;
use hotspare_image::files::{FileChange, FileName, InodeNumber};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, RenameFlags};

use crate::error::FilesError;
use crate::flusher::Flusher;
use crate::mount::Mount;
use crate::shared::Shared;
use crate::store::OpenFile;

/// Files kept open while a set is applied.
const FILES_OPEN_MAX: usize = 64;

/// What changed below the kernel's caches.
#[derive(Debug, Default)]
struct Stale {
    entries: BTreeSet<(InodeNumber, FileName)>,
    /// Range of content from, to; `None` if only attributes changed.
    inodes: BTreeMap<InodeNumber, Option<(u64, u64)>>,
}

impl Stale {
    fn content(&mut self, inode: InodeNumber, from: u64, to: u64) {
        let range = self.inodes.entry(inode).or_default();
        *range = Some(match *range {
            Some((start, end)) => (start.min(from), end.max(to)),
            None => (from, to),
        });
    }

    fn attributes(&mut self, inode: InodeNumber) {
        self.inodes.entry(inode).or_default();
    }
}

/// Applies changes one after the other. [`Applier::finish`] must follow.
pub(crate) struct Applier<'a> {
    shared: &'a Shared,
    stale: Stale,
    open: HashMap<InodeNumber, Arc<OpenFile>>,
}

impl<'a> Applier<'a> {
    pub fn new(shared: &'a Shared) -> Applier<'a> {
        Applier { shared, stale: Stale::default(), open: HashMap::new() }
    }

    /// Applies one change of names, content or attributes.
    pub fn apply(&mut self, change: &FileChange) -> Result<(), FilesError> {
        let (doing, inode, result) = match change {
            FileChange::Create { parent, .. }
            | FileChange::Link { parent, .. }
            | FileChange::Remove { parent, .. }
            | FileChange::Rename { to_parent: parent, .. } => {
                ("change names in", *parent, self.apply_name(change))
            }
            FileChange::CreateNameless { node } => {
                let mut tree = self.shared.store.tree_mut();
                let result = self.shared.store.create_nameless(&mut tree, node);
                ("make an unnamed file in", InodeNumber::ROOT, result)
            }
            FileChange::Write { inode, .. }
            | FileChange::Truncate { inode, .. }
            | FileChange::Allocate { inode, .. } => ("write", *inode, self.apply_content(change)),
            FileChange::SetXattr { inode, .. }
            | FileChange::RemoveXattr { inode, .. }
            | FileChange::Attributes { inode, .. } => {
                ("set attributes of", *inode, self.apply_attributes(change))
            }
            FileChange::Forget { inode } => {
                self.close(*inode);
                self.shared.store.tree_mut().forget(*inode);
                return Ok(());
            }
            FileChange::CopyBegin { .. } | FileChange::CopyEnd { .. } | FileChange::Mark { .. } => {
                return Err(FilesError::Malformed("a mark among changes".into()));
            }
        };
        result.map_err(|error| {
            FilesError::backing(doing, &self.shared.store.message_path(inode), error)
        })
    }

    /// Discards everything, for an initial copy whose inodes are numbered from `next` on
    /// afterwards.
    pub fn clear(&mut self, next: InodeNumber) -> Result<(), FilesError> {
        self.close_all();
        {
            let tree = self.shared.store.tree();
            for (inode, node) in tree.inodes().filter(|(inode, _)| tree.known_to_kernel(*inode)) {
                self.stale.content(inode, 0, u64::MAX);
                let entries = node.entries.iter().map(|(name, _)| (inode, name.clone()));
                self.stale.entries.extend(entries);
            }
        }
        self.shared.store.clear(next.0)
    }

    fn apply_name(&mut self, change: &FileChange) -> Result<(), Errno> {
        let store = &self.shared.store;
        let mut tree = store.tree_mut();
        match change {
            FileChange::Create { parent, name, node } => {
                store.create(&mut tree, *parent, name, node)?;
                self.stale.entries.insert((*parent, name.clone()));
            }
            FileChange::Link { inode, parent, name } => {
                store.link(&mut tree, *inode, *parent, name)?;
                self.stale.entries.insert((*parent, name.clone()));
                self.stale.attributes(*inode);
            }
            FileChange::Remove { parent, name } => {
                let inode = store.remove(&mut tree, *parent, name)?;
                self.stale.entries.insert((*parent, name.clone()));
                self.stale.attributes(inode);
            }
            FileChange::Rename { from_parent, from_name, to_parent, to_name, exchange } => {
                let flags =
                    if *exchange { RenameFlags::RENAME_EXCHANGE } else { RenameFlags::empty() };
                let (from, to) = ((*from_parent, from_name), (*to_parent, to_name));
                let replaced = store.rename(&mut tree, from, to, flags)?;
                self.stale.entries.insert((*from_parent, from_name.clone()));
                self.stale.entries.insert((*to_parent, to_name.clone()));
                if let Some(replaced) = replaced {
                    self.stale.attributes(replaced);
                }
            }
            other => unreachable!("not a change of names: {other:?}"),
        }
        Ok(())
    }

    fn apply_content(&mut self, change: &FileChange) -> Result<(), Errno> {
        match change {
            FileChange::Write { inode, offset, bytes } => {
                let end = offset.checked_add(bytes.len() as u64).ok_or(Errno::EFBIG)?;
                let open = self.content(*inode)?;
                open.file.write_all_at(bytes, *offset).map_err(errno)?;
                self.stale.content(*inode, *offset, end);
            }
            FileChange::Truncate { inode, size_bytes } => {
                let open = self.content(*inode)?;
                let before = open.file.metadata().map_err(errno)?.len();
                open.file.set_len(*size_bytes).map_err(errno)?;
                self.stale.content(*inode, before.min(*size_bytes), u64::MAX);
            }
            FileChange::Allocate { inode, offset, length, mode } => {
                let open = self.content(*inode)?;
                allocate(&open.file, *offset, *length, *mode)?;
                self.stale.content(*inode, *offset, u64::MAX);
            }
            other => unreachable!("not a change of content: {other:?}"),
        }
        Ok(())
    }

    fn apply_attributes(&mut self, change: &FileChange) -> Result<(), Errno> {
        let store = &self.shared.store;
        let mut tree = store.tree_mut();
        let c_name = |name: &[u8]| CString::new(name).map_err(|_| Errno::EINVAL);
        let inode = match change {
            FileChange::SetXattr { inode, name, value } => {
                let fd = store.node_fd(&tree, *inode)?;
                hotspare_kernel::set_xattr(fd, &c_name(name)?, value, 0)?;
                inode
            }
            FileChange::RemoveXattr { inode, name } => {
                let fd = store.node_fd(&tree, *inode)?;
                match hotspare_kernel::remove_xattr(fd, &c_name(name)?) {
                    // An initial copy may have been made after its removal.
                    Ok(()) | Err(Errno::ENODATA) => {}
                    Err(error) => return Err(error),
                }
                inode
            }
            FileChange::Attributes { inode, attributes } => {
                store.set_attributes(&mut tree, *inode, attributes)?;
                inode
            }
            other => unreachable!("not a change of attributes: {other:?}"),
        };
        self.stale.attributes(*inode);
        Ok(())
    }

    fn content(&mut self, inode: InodeNumber) -> Result<Arc<OpenFile>, Errno> {
        if let Some(open) = self.open.get(&inode) {
            return Ok(open.clone());
        }
        if self.open.len() >= FILES_OPEN_MAX {
            self.close_all();
        }
        let open = self.shared.store.acquire(inode, false, None)?;
        self.open.insert(inode, open.clone());
        Ok(open)
    }

    fn close(&mut self, inode: InodeNumber) {
        if self.open.remove(&inode).is_some() {
            self.shared.store.release(inode, false);
        }
    }

    fn close_all(&mut self) {
        for (inode, _) in self.open.drain() {
            self.shared.store.release(inode, false);
        }
    }

    /// Makes the kernel forget what it knew of everything that changed. The tree must not be
    /// locked: the kernel may be waiting for an answer of ours before it can forget.
    pub fn finish(mut self, mount: &Mount, flusher: &Flusher) {
        self.close_all();
        let stale = std::mem::take(&mut self.stale);
        let known: BTreeSet<InodeNumber> = {
            let tree = self.shared.store.tree();
            let parents = stale.entries.iter().map(|(parent, _)| *parent);
            let inodes = stale.inodes.keys().copied().chain(parents);
            inodes.filter(|inode| tree.known_to_kernel(*inode)).collect()
        };
        for (parent, name) in stale.entries.iter().filter(|(parent, _)| known.contains(parent)) {
            let name = OsStr::from_bytes(name.as_bytes());
            log_failure("entry", mount.notifier.inval_entry(INodeNo(parent.0), name));
        }
        let mut sizes = Vec::new();
        for (inode, range) in stale.inodes.iter().filter(|(inode, _)| known.contains(inode)) {
            let (from, length) = match range {
                None => (-1, 0),
                Some((from, to)) => {
                    let length = if *to == u64::MAX { 0 } else { to - from };
                    (*from as i64, length as i64)
                }
            };
            let number = INodeNo(inode.0);
            log_failure("inode", mount.notifier.inval_inode(number, from, length));
            if range.is_some() {
                sizes.push(*inode);
            }
        }
        if !sizes.is_empty() {
            let refreshed = flusher.refresh_sizes(sizes);
            log_failure("size", refreshed.map_err(|(_, error)| error));
        }
    }
}

impl Drop for Applier<'_> {
    fn drop(&mut self) {
        self.close_all();
    }
}

fn log_failure(what: &str, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!("cannot refresh the kernel's knowledge of a replicated {what}: {error}");
    }
}

fn errno(error: io::Error) -> Errno {
    crate::error::errno_of(&error)
}

/// fallocate(2), done by hand where the file system has it not.
fn allocate(file: &File, offset: u64, length: u64, mode: i32) -> Result<(), Errno> {
    let flags = FallocateFlags::from_bits(mode).ok_or(Errno::EINVAL)?;
    let signed = |value: u64| i64::try_from(value).map_err(|_| Errno::EFBIG);
    match nix::fcntl::fallocate(file, flags, signed(offset)?, signed(length)?) {
        Err(Errno::EOPNOTSUPP) => {}
        result => return result,
    }
    let size = file.metadata().map_err(errno)?.len();
    let end = offset.checked_add(length).ok_or(Errno::EFBIG)?;
    let zeroes = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_ZERO_RANGE;
    if flags.intersects(zeroes) {
        let mut at = offset;
        let zero = [0u8; 1 << 16];
        while at < end.min(size) {
            let count = (end.min(size) - at).min(zero.len() as u64);
            file.write_all_at(&zero[..count as usize], at).map_err(errno)?;
            at += count;
        }
    }
    if !flags.contains(FallocateFlags::FALLOC_FL_KEEP_SIZE) && end > size {
        file.set_len(end).map_err(errno)?;
    }
    Ok(())
}
