//! A replicated directory, whole: served, cut, copied, applied.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hotspare_image::files::{CopyMark, FileChange, InodeNumber, decode_changes};
use nix::errno::Errno;

use crate::apply::Applier;
use crate::change_set::ChangeSet;
use crate::error::FilesError;
use crate::flusher::Flusher;
use crate::initial_copy::InitialCopy;
use crate::log::{ChangeLog, LogLimits};
use crate::mount::Mount;
use crate::shared::Shared;
use crate::store::{Store, proc_path};

/// Which side of the replication this host is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The guest runs here and changes the directory.
    Primary,
    /// Only [`ReplicatedDir::apply`] changes the directory; to everyone else it is read-only.
    Spare,
}

/// How far a spare's copy is.
///
/// ```text
/// Absent ──CopyBegin──▶ Copying ──CopyEnd──▶ AwaitingMark ──set with Mark──▶ Complete
///                          any error ──▶ Unusable ──CopyBegin──▶ Copying
/// ```
#[derive(Debug)]
enum Copy {
    /// No initial copy has begun. Changes that arrive now are part of the one that will.
    Absent,
    /// The initial copy is arriving; sets that arrive meanwhile wait.
    Copying { mark: CopyMark, waiting: ChangeSet },
    /// Changes up to the mark are part of the copy.
    AwaitingMark(CopyMark),
    /// Equal to the primary's directory at the last applied checkpoint.
    Complete,
    /// Something failed half-way.
    Unusable(String),
}

/// A directory whose changes are part of the checkpoints.
///
/// On the primary: [`serve`](Self::serve), then for each spare that joins
/// [`initial_copy`](Self::initial_copy), and at each checkpoint [`flush`](Self::flush) and
/// [`cut`](Self::cut). On the spare: `serve`, then [`copy_chunk`](Self::copy_chunk) and
/// [`apply`](Self::apply), and at failover [`promote`](Self::promote).
///
/// The backing directory must be changed by nobody else while it is served. Inode numbers, the
/// order of listings, link counts, times, owners, modes and xattrs are the same on all hosts;
/// `st_dev` and `st_blocks` need not be. Not supported: devices, POSIX ACLs, `O_TMPFILE`, access
/// times of reads.
#[derive(Debug)]
pub struct ReplicatedDir {
    mount: Mount,
    shared: Arc<Shared>,
    flusher: Flusher,
    copy: Mutex<Copy>,
    marks: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReplicatedDir {
    /// Serves `backing` at `mountpoint`, which may be moved or cloned into other mount namespaces
    /// afterwards. `backing` is opened first, so `mountpoint` may be the same path. On a spare the
    /// directory is empty until the initial copy, which discards what `backing` has in it.
    pub fn serve(backing: &Path, mountpoint: &Path, role: Role) -> Result<Self, FilesError> {
        Self::serve_with(backing, mountpoint, role, LogLimits::default())
    }

    /// [`serve`](Self::serve) with other limits.
    pub fn serve_with(
        backing: &Path,
        mountpoint: &Path,
        role: Role,
        limits: LogLimits,
    ) -> Result<Self, FilesError> {
        let store = Store::open(backing)?;
        if role == Role::Primary {
            store.scan()?;
        }
        let log = ChangeLog::new(limits, proc_path(store.root().as_fd()).into());
        let shared = Arc::new(Shared {
            store,
            log,
            primary: AtomicBool::new(role == Role::Primary),
            flushing_thread: AtomicU32::new(0),
        });
        let mount = Mount::new(shared.clone(), mountpoint)?;
        let flusher = Flusher::start(mount.root())
            .map_err(|error| FilesError::mount("start to flush", mountpoint, error))?;
        shared.flushing_thread.store(flusher.thread, Ordering::Release);
        Ok(ReplicatedDir {
            mount,
            shared,
            flusher,
            copy: Mutex::new(Copy::Absent),
            marks: AtomicU64::new(1),
        })
    }

    /// Has `wanted` called when so much has changed that the next checkpoint should come early. It
    /// is called once per epoch from a thread that a writer of the guest waits for: it must not
    /// block. Without a cut writers are slowed down, and at last their content is kept on disk.
    pub fn on_cut_wanted(&self, wanted: impl Fn() + Send + Sync + 'static) {
        self.shared.log.on_cut_wanted(Box::new(wanted));
    }

    /// Starts an initial copy for a spare that joins, and to record changes if that has not begun.
    /// The guest goes on meanwhile; no instant of it needs to be stopped. The spare needs, in any
    /// order relative to the copy's chunks, every set cut from now on.
    pub fn initial_copy(&self) -> InitialCopy {
        let mark = CopyMark(self.marks.fetch_add(1, Ordering::AcqRel));
        InitialCopy::new(self.shared.clone(), mark)
    }

    /// A copy of a spare's directory as it is after the sets applied so far, for one that takes
    /// part from then on. Whoever takes it needs its first chunk, then the chunk of changes that
    /// comes with it, then in any order relative to its other chunks those of every set applied
    /// from now on. No set may be half applied when this is called.
    pub fn copy_of_spare(&self) -> Result<(InitialCopy, Vec<u8>), FilesError> {
        let mark = CopyMark(self.marks.fetch_add(1, Ordering::AcqRel));
        let copy = InitialCopy::begin(self.shared.clone(), mark, false);
        let mut first = self.staging();
        first.push(FileChange::Mark { mark });
        let chunk = first.chunks(1).next();
        Ok((copy, chunk.unwrap_or_else(|| Ok(Vec::new()))?))
    }

    /// Stops recording: there is no spare. The next one begins with an initial copy.
    pub fn stop_recording(&self) {
        self.shared.log.stop();
        // Nothing is left to flush; it lets go of its files.
        let _ = self.flusher.flush(Vec::new());
    }

    /// Whether changes are recorded.
    pub fn recording(&self) -> bool {
        self.shared.log.recording()
    }

    /// Has the kernel hand over what the guest wrote through shared mappings.
    ///
    /// To be exact it must run while the guest is stopped, right before [`cut`](Self::cut); run it
    /// once more just before the stop so that little is left to do then. Considers every file that
    /// is open `O_RDWR`: one open and one fsync request per file the first time, one fsync request
    /// (some 20 µs) later. Writes by write(2) need no flush, and closed files and mappings have
    /// none left (the kernel writes back when a mapping goes away).
    pub fn flush(&self) -> Result<(), FilesError> {
        self.flush_inodes(&self.shared.store.mappable_inodes())
    }

    /// [`flush`](Self::flush) for the files the caller knows to be mapped shared and writable.
    pub fn flush_inodes(&self, inodes: &[InodeNumber]) -> Result<(), FilesError> {
        self.shared.log.set_undelayed(true);
        let result = self.flusher.flush(inodes.to_vec());
        self.shared.log.set_undelayed(false);
        result.map_err(|(inode, error)| {
            let path = self.shared.store.message_path(inode);
            FilesError::backing("write back mapped pages of", &path, error)
        })
    }

    /// Everything that changed since the last cut: every operation that was answered before the
    /// call, and attributes as they are now. Exact while the guest is stopped. Costs no copy of
    /// content, and one stat per changed inode.
    pub fn cut(&self) -> Result<ChangeSet, FilesError> {
        let store = &self.shared.store;
        let cut = self
            .shared
            .log
            .cut()
            .map_err(|reason| FilesError::ChangesLost { path: store.backing.clone(), reason })?;
        let touched = cut.touched.clone();
        let mut set = ChangeSet::from_cut(cut);
        let tree = store.tree();
        for inode in touched {
            match store.attributes(&tree, inode) {
                Ok((_, attributes)) => set.push(FileChange::Attributes { inode, attributes }),
                // Gone since; the next set says so.
                Err(Errno::ESTALE) => {}
                Err(error) => {
                    drop(tree);
                    let path = store.message_path(inode);
                    return Err(FilesError::backing("read attributes of", &path, error));
                }
            }
        }
        Ok(set)
    }

    /// An empty set to collect received chunks in.
    pub fn staging(&self) -> ChangeSet {
        ChangeSet::staging(proc_path(self.shared.store.root().as_fd()))
    }

    /// Applies a set of a complete checkpoint. Sets must come in order. While the initial copy is
    /// arriving the set waits; before it, there is nothing to do. After an error the copy is
    /// unusable until the next initial copy.
    pub fn apply(&self, set: &ChangeSet) -> Result<(), FilesError> {
        let mut copy = lock(&self.copy);
        let result = self.apply_in(&mut copy, set);
        self.remember_failure(&mut copy, result)
    }

    fn apply_in(&self, copy: &mut Copy, set: &ChangeSet) -> Result<(), FilesError> {
        let mark = match copy {
            Copy::Absent => return Ok(()),
            Copy::Copying { waiting, .. } => return waiting.append(set),
            Copy::AwaitingMark(mark) => Some(*mark),
            Copy::Complete => None,
            Copy::Unusable(reason) => {
                let path = self.shared.store.backing.clone();
                return Err(FilesError::CopyUnusable { path, reason: reason.clone() });
            }
        };
        let mut skipping = mark;
        let mut applier = Applier::new(&self.shared);
        for change in set.changes() {
            match change? {
                FileChange::Mark { mark } => {
                    if skipping == Some(mark) {
                        skipping = None;
                    }
                }
                _ if skipping.is_some() => {}
                change => applier.apply(&change)?,
            }
        }
        applier.finish(&self.mount, &self.flusher);
        if skipping.is_none() {
            *copy = Copy::Complete;
        }
        Ok(())
    }

    /// Applies a chunk of an initial copy. The first one empties the backing directory.
    pub fn copy_chunk(&self, chunk: &[u8]) -> Result<(), FilesError> {
        let mut copy = lock(&self.copy);
        let result = self.copy_chunk_in(&mut copy, chunk);
        self.remember_failure(&mut copy, result)
    }

    fn copy_chunk_in(&self, copy: &mut Copy, chunk: &[u8]) -> Result<(), FilesError> {
        let changes =
            decode_changes(chunk).map_err(|error| FilesError::Malformed(error.to_string()))?;
        let mut applier = Applier::new(&self.shared);
        let mut complete = None;
        for change in &changes {
            match (change, &mut *copy) {
                (FileChange::CopyBegin { mark, next_inode }, copy) => {
                    applier.clear(*next_inode)?;
                    *copy = Copy::Copying { mark: *mark, waiting: self.staging() };
                }
                (FileChange::CopyEnd { mark }, Copy::Copying { mark: begun, waiting })
                    if mark == begun =>
                {
                    complete = Some(std::mem::take(waiting));
                    *copy = Copy::AwaitingMark(*mark);
                }
                (change, Copy::Copying { .. }) => applier.apply(change)?,
                (_, _) => {
                    let outside = "a part of an initial copy that has not begun";
                    return Err(FilesError::Malformed(outside.into()));
                }
            }
        }
        applier.finish(&self.mount, &self.flusher);
        match complete {
            Some(waiting) => self.apply_in(copy, &waiting),
            None => Ok(()),
        }
    }

    fn remember_failure(
        &self,
        copy: &mut Copy,
        result: Result<(), FilesError>,
    ) -> Result<(), FilesError> {
        if let Err(error) = &result
            && !matches!(copy, Copy::Unusable(_))
        {
            *copy = Copy::Unusable(error.to_string());
        }
        result
    }

    /// Whether this spare's copy equals the primary's directory at the last applied set.
    pub fn is_complete(&self) -> bool {
        matches!(*lock(&self.copy), Copy::Complete)
    }

    /// Makes a spare's directory the guest's: from now on it can be written. Nothing is recorded
    /// until the next [`initial_copy`](Self::initial_copy). Refused unless the copy is complete.
    pub fn promote(&self) -> Result<(), FilesError> {
        let reason = match &*lock(&self.copy) {
            Copy::Complete => {
                self.shared.primary.store(true, Ordering::Release);
                return Ok(());
            }
            Copy::Absent => "there is none".to_owned(),
            Copy::Copying { .. } | Copy::AwaitingMark(_) => "it is not complete".to_owned(),
            Copy::Unusable(reason) => reason.clone(),
        };
        Err(FilesError::CopyUnusable { path: self.shared.store.backing.clone(), reason })
    }

    /// Lets go of unlinked files that nobody opened here. To be called after
    /// [`promote`](Self::promote) once all open files of the guest are restored.
    pub fn discard_unopened(&self) {
        let nameless: Vec<InodeNumber> = {
            let tree = self.shared.store.tree();
            let unused = tree.inodes().filter(|(_, node)| node.nameless.is_some());
            unused.map(|(inode, _)| inode).collect()
        };
        for inode in nameless {
            self.shared.forget_unused(inode);
        }
    }

    /// Which side this is.
    pub fn role(&self) -> Role {
        if self.shared.primary.load(Ordering::Acquire) { Role::Primary } else { Role::Spare }
    }

    /// `st_dev` of every file in the mount.
    pub fn device(&self) -> u64 {
        self.mount.device
    }

    /// The root directory of the mount, as it was mounted.
    pub fn root(&self) -> &File {
        self.mount.root()
    }

    /// Path of an inode relative to the directory (one of them, if it has several); `None` if it
    /// has no name or does not exist.
    pub fn path_of(&self, inode: InodeNumber) -> Option<PathBuf> {
        let path = self.shared.store.tree().path(inode)?;
        Some(PathBuf::from(OsStr::from_bytes(&path)))
    }

    /// Opens an inode through the mount, named or not. For a file of another mount of it (the
    /// guest's namespace), call [`hotspare_kernel::open_fuse_inode`] with a descriptor of that.
    /// `flags` are those of open(2) without `O_CREAT`.
    pub fn open_inode(&self, inode: InodeNumber, flags: i32) -> Result<OwnedFd, Errno> {
        hotspare_kernel::open_fuse_inode(self.mount.root().as_fd(), inode.0, flags)
    }

    /// Unmounts. Where the mount was moved or cloned to, it stays until that goes away.
    pub fn unmount(self) {
        drop(self);
    }
}
