//! The backing directory and the tree over it: every operation that changes both, used by the FUSE
//! server on the primary and by `apply` on the spare.
//!
//! The backing directory is reached only through the descriptor opened before anything was mounted
//! over it, without following symbolic links or crossing mounts. Lock order: tree, open files, a
//! file's `order`, the log.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use hotspare_image::files::{FileName, FileTime, InodeNumber, NewNode, NodeAttributes, NodeKind};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, RenameFlags, ResolveFlag};
use nix::sys::stat::{
    FchmodatFlags, FileStat, Mode, SFlag, UtimensatFlags, fchmodat, fstat, mkdirat, mknodat,
    utimensat,
};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, linkat, symlinkat, unlinkat};

use crate::error::FilesError;
use crate::tree::{CarriedChangeTime, Kind, Tree};

/// Longest path handed to the kernel at once, bytes (`PATH_MAX` is 4096).
const PATH_PIECE_BYTES_MAX: usize = 4000;

/// A regular file that is open in the guest (or being worked on). All handles share it.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub file: File,
    /// Held from a change of the content until the log has it, so that both agree on the order.
    pub order: Mutex<()>,
    handles: AtomicU32,
    /// Handles through which pages can be written by mmap(2) (`O_RDWR`).
    mappable: AtomicU32,
}

/// Some descriptor of an inode, possibly `O_PATH`.
pub(crate) enum NodeFd {
    Open(Arc<OpenFile>),
    Nameless(Arc<OwnedFd>),
    Path(OwnedFd),
}

impl AsFd for NodeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            NodeFd::Open(open) => open.file.as_fd(),
            NodeFd::Nameless(fd) => fd.as_fd(),
            NodeFd::Path(fd) => fd.as_fd(),
        }
    }
}

impl NodeFd {
    fn proc_path(&self) -> String {
        proc_path(self.as_fd())
    }

    pub fn stat(&self) -> Result<FileStat, Errno> {
        fstat(self.as_fd())
    }

    pub fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> Result<(), Errno> {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        fchownat(self.as_fd(), "", uid, gid, AtFlags::AT_EMPTY_PATH)
    }

    /// Sets permission bits. Not for symbolic links, which have none.
    pub fn set_mode(&self, mode: u32) -> Result<(), Errno> {
        let mode = Mode::from_bits_truncate(mode & 0o7777);
        fchmodat(AT_FDCWD, self.proc_path().as_str(), mode, FchmodatFlags::FollowSymlink)
    }

    pub fn set_times(&self, accessed: TimeSpec, modified: TimeSpec) -> Result<(), Errno> {
        let path = self.proc_path();
        let follow = UtimensatFlags::FollowSymlink;
        utimensat(AT_FDCWD, path.as_str(), &accessed, &modified, follow)
    }
}

/// A name by which this process can open what an `O_PATH` descriptor stands for.
pub(crate) fn proc_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

pub(crate) fn times_of(stat: &FileStat) -> (FileTime, FileTime, FileTime) {
    let time = |seconds, nanoseconds: i64| FileTime { seconds, nanoseconds: nanoseconds as u32 };
    (
        time(stat.st_atime, stat.st_atime_nsec),
        time(stat.st_mtime, stat.st_mtime_nsec),
        time(stat.st_ctime, stat.st_ctime_nsec),
    )
}

fn os(name: &FileName) -> &OsStr {
    OsStr::from_bytes(name.as_bytes())
}

fn kind_of(kind: &NodeKind) -> Kind {
    match kind {
        NodeKind::Regular => Kind::Regular,
        NodeKind::Directory => Kind::Directory,
        NodeKind::Symlink(_) => Kind::Symlink,
        NodeKind::Fifo => Kind::Fifo,
        NodeKind::Socket => Kind::Socket,
    }
}

/// Names and inodes of one replicated directory, and what backs them.
#[derive(Debug)]
pub(crate) struct Store {
    root: File,
    /// Where the backing directory is, for messages.
    pub backing: PathBuf,
    tree: RwLock<Tree>,
    open: RwLock<HashMap<InodeNumber, Arc<OpenFile>>>,
}

impl Store {
    /// Opens the directory; the tree is empty.
    pub fn open(backing: &Path) -> Result<Store, FilesError> {
        let failed = |error| FilesError::backing("open directory", backing, error);
        let backing = backing.canonicalize().map_err(failed)?;
        if backing == Path::new("/") {
            return Err(FilesError::Unreplicable { path: backing, what: "the root directory" });
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let root = nix::fcntl::open(&backing, flags, Mode::empty())
            .map_err(|error| FilesError::backing("open directory", &backing, error))?;
        Ok(Store {
            root: File::from(root),
            backing,
            tree: RwLock::new(Tree::new()),
            open: RwLock::default(),
        })
    }

    pub fn root(&self) -> &File {
        &self.root
    }

    pub fn tree(&self) -> RwLockReadGuard<'_, Tree> {
        self.tree.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn tree_mut(&self) -> RwLockWriteGuard<'_, Tree> {
        self.tree.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_files(&self) -> RwLockReadGuard<'_, HashMap<InodeNumber, Arc<OpenFile>>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_files_mut(&self) -> RwLockWriteGuard<'_, HashMap<InodeNumber, Arc<OpenFile>>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Full path of an inode for messages.
    pub fn message_path(&self, inode: InodeNumber) -> PathBuf {
        match self.tree().path(inode) {
            Some(path) => self.backing.join(OsStr::from_bytes(&path)),
            None => self.backing.join(format!("(unlinked inode {inode})")),
        }
    }

    /// Opens `path` below the backing directory, however long it is.
    fn open_beneath(&self, path: &[u8], flags: OFlag) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlag::RESOLVE_BENEATH
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_XDEV;
        let how = |flags| OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(resolve);
        let mut rest = path;
        let mut at: Option<OwnedFd> = None;
        loop {
            let from = at.as_ref().map_or(self.root.as_fd(), |fd| fd.as_fd());
            if rest.len() <= PATH_PIECE_BYTES_MAX {
                let last = if rest.is_empty() { b"." } else { rest };
                return nix::fcntl::openat2(from, last, how(flags | OFlag::O_NOFOLLOW));
            }
            let cut = rest[..PATH_PIECE_BYTES_MAX]
                .iter()
                .rposition(|byte| *byte == b'/')
                .ok_or(Errno::ENAMETOOLONG)?;
            let directory = OFlag::O_PATH | OFlag::O_DIRECTORY;
            at = Some(nix::fcntl::openat2(from, &rest[..cut], how(directory))?);
            rest = &rest[cut + 1..];
        }
    }

    /// A descriptor of a directory, to work on names in it.
    fn directory_fd(&self, tree: &Tree, inode: InodeNumber) -> Result<OwnedFd, Errno> {
        tree.directory(inode)?;
        let path = tree.path(inode).ok_or(Errno::ENOENT)?;
        self.open_beneath(&path, OFlag::O_PATH | OFlag::O_DIRECTORY)
    }

    /// Some descriptor of an inode.
    pub fn node_fd(&self, tree: &Tree, inode: InodeNumber) -> Result<NodeFd, Errno> {
        if let Some(open) = self.open_files().get(&inode) {
            return Ok(NodeFd::Open(open.clone()));
        }
        let node = tree.node(inode)?;
        if let Some(fd) = &node.nameless {
            return Ok(NodeFd::Nameless(fd.clone()));
        }
        let path = tree.path(inode).ok_or(Errno::ESTALE)?;
        Ok(NodeFd::Path(self.open_beneath(&path, OFlag::O_PATH)?))
    }

    /// Opens the content of a regular file for reading and, where that is possible, writing.
    pub fn open_content(&self, tree: &Tree, inode: InodeNumber) -> Result<File, Errno> {
        let node = tree.node(inode)?;
        if node.kind != Kind::Regular {
            return Err(Errno::EINVAL);
        }
        let open = |mode: OFlag| {
            let flags = mode | OFlag::O_NOATIME | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
            match &node.nameless {
                Some(fd) => {
                    let path = proc_path(fd.as_fd());
                    nix::fcntl::open(path.as_str(), flags, Mode::empty())
                }
                None => self.open_beneath(&tree.path(inode).ok_or(Errno::ESTALE)?, flags),
            }
        };
        match open(OFlag::O_RDWR) {
            Err(Errno::EROFS | Errno::EACCES | Errno::EPERM | Errno::ETXTBSY) => {
                open(OFlag::O_RDONLY).map(File::from)
            }
            result => result.map(File::from),
        }
    }

    /// The open file of an inode, if it is open.
    pub fn opened(&self, inode: InodeNumber) -> Option<Arc<OpenFile>> {
        self.open_files().get(&inode).cloned()
    }

    /// Opens an inode; each call is paired with [`Store::release`]. `file` is its content, if the
    /// caller has it open already.
    pub fn acquire(
        &self,
        inode: InodeNumber,
        mappable: bool,
        file: Option<File>,
    ) -> Result<Arc<OpenFile>, Errno> {
        let file = match (file, self.opened(inode)) {
            (Some(file), _) => Some(file),
            (None, Some(_)) => None,
            (None, None) => Some(self.open_content(&self.tree(), inode)?),
        };
        let mut open = self.open_files_mut();
        if let Some(opened) = open.get(&inode) {
            opened.handles.fetch_add(1, Ordering::AcqRel);
            opened.mappable.fetch_add(u32::from(mappable), Ordering::AcqRel);
            return Ok(opened.clone());
        }
        let Some(file) = file else {
            // Closed by another thread since `opened` looked.
            drop(open);
            let file = self.open_content(&self.tree(), inode)?;
            return self.acquire(inode, mappable, Some(file));
        };
        let opened = Arc::new(OpenFile {
            file,
            order: Mutex::default(),
            handles: AtomicU32::new(1),
            mappable: AtomicU32::new(u32::from(mappable)),
        });
        open.insert(inode, opened.clone());
        Ok(opened)
    }

    /// Undoes one [`Store::acquire`].
    pub fn release(&self, inode: InodeNumber, mappable: bool) {
        let mut open = self.open_files_mut();
        if let Some(opened) = open.get(&inode) {
            opened.mappable.fetch_sub(u32::from(mappable), Ordering::AcqRel);
            if opened.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
                open.remove(&inode);
            }
        }
    }

    /// Inodes open in a way that allows shared writable mappings.
    pub fn mappable_inodes(&self) -> Vec<InodeNumber> {
        let mappable = |(inode, open): (&InodeNumber, &Arc<OpenFile>)| {
            (open.mappable.load(Ordering::Acquire) > 0).then_some(*inode)
        };
        self.open_files().iter().filter_map(mappable).collect()
    }

    /// Makes a new inode under a free name. A regular file is returned open.
    pub fn create(
        &self,
        tree: &mut Tree,
        parent: InodeNumber,
        name: &FileName,
        new: &NewNode,
    ) -> Result<Option<File>, Errno> {
        let directory = self.directory_fd(tree, parent)?;
        if tree.child(parent, name).is_ok() {
            return Err(Errno::EEXIST);
        }
        let made = self.make(&directory, name, new)?;
        let settled = set_up(&directory, name, new).and_then(|()| {
            tree.add(new.inode, kind_of(&new.kind))?;
            tree.link(parent, name.clone(), new.inode)
        });
        if let Err(error) = settled {
            let flag = match new.kind {
                NodeKind::Directory => UnlinkatFlags::RemoveDir,
                _ => UnlinkatFlags::NoRemoveDir,
            };
            let _ = unlinkat(&directory, os(name), flag);
            return Err(error);
        }
        Ok(made)
    }

    fn make(
        &self,
        directory: &OwnedFd,
        name: &FileName,
        new: &NewNode,
    ) -> Result<Option<File>, Errno> {
        let name = os(name);
        let (owner_only, no_device) = (Mode::S_IRUSR | Mode::S_IWUSR, 0);
        match &new.kind {
            NodeKind::Regular => {
                let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_RDWR | OFlag::O_NOFOLLOW;
                let flags = flags | OFlag::O_CLOEXEC | OFlag::O_NOATIME;
                let file = nix::fcntl::openat(directory, name, flags, owner_only)?;
                return Ok(Some(File::from(file)));
            }
            NodeKind::Directory => mkdirat(directory, name, Mode::S_IRWXU)?,
            NodeKind::Symlink(target) => {
                symlinkat(OsStr::from_bytes(target), directory, name)?;
            }
            NodeKind::Fifo => mknodat(directory, name, SFlag::S_IFIFO, owner_only, no_device)?,
            NodeKind::Socket => mknodat(directory, name, SFlag::S_IFSOCK, owner_only, no_device)?,
        }
        Ok(None)
    }

    /// Makes a new regular inode that has no name.
    pub fn create_nameless(&self, tree: &mut Tree, new: &NewNode) -> Result<(), Errno> {
        // Any free name will do for the instant it exists.
        let name = FileName::new(format!(".hotspare-nameless-{}", new.inode).as_bytes())
            .ok_or(Errno::EINVAL)?;
        self.create(tree, InodeNumber::ROOT, &name, new)?;
        self.remove(tree, InodeNumber::ROOT, &name).map(drop)
    }

    /// Gives an inode one more name.
    pub fn link(
        &self,
        tree: &mut Tree,
        inode: InodeNumber,
        parent: InodeNumber,
        name: &FileName,
    ) -> Result<(), Errno> {
        let (old_parent, old_name) =
            tree.node(inode)?.names.first().cloned().ok_or(Errno::ENOENT)?;
        if tree.node(inode)?.kind == Kind::Directory {
            return Err(Errno::EPERM);
        }
        let (from, to) = (self.directory_fd(tree, old_parent)?, self.directory_fd(tree, parent)?);
        if tree.child(parent, name).is_ok() {
            return Err(Errno::EEXIST);
        }
        linkat(from, os(&old_name), to, os(name), AtFlags::empty())?;
        tree.link(parent, name.clone(), inode)
    }

    /// Keeps an inode that is about to lose its last name.
    fn keep_nameless(&self, tree: &mut Tree, inode: InodeNumber) -> Result<(), Errno> {
        let node = tree.node(inode)?;
        if node.names.len() > 1 {
            return Ok(());
        }
        let fd = match node.kind {
            Kind::Regular => OwnedFd::from(self.open_content(tree, inode)?),
            Kind::Directory | Kind::Symlink | Kind::Fifo | Kind::Socket => {
                let path = tree.path(inode).ok_or(Errno::ESTALE)?;
                self.open_beneath(&path, OFlag::O_PATH)?
            }
        };
        tree.node_mut(inode)?.nameless = Some(Arc::new(fd));
        Ok(())
    }

    /// Takes a name away: unlink or rmdir. Returns whose name it was; an inode whose last name it
    /// was lives on without.
    pub fn remove(
        &self,
        tree: &mut Tree,
        parent: InodeNumber,
        name: &FileName,
    ) -> Result<InodeNumber, Errno> {
        let inode = tree.child(parent, name)?;
        let directory = self.directory_fd(tree, parent)?;
        let is_directory = tree.node(inode)?.kind == Kind::Directory;
        if is_directory && !tree.node(inode)?.entries.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.keep_nameless(tree, inode)?;
        let flag = if is_directory { UnlinkatFlags::RemoveDir } else { UnlinkatFlags::NoRemoveDir };
        if let Err(error) = unlinkat(directory, os(name), flag) {
            tree.node_mut(inode)?.nameless = None;
            return Err(error);
        }
        tree.unlink(parent, name)
    }

    /// Moves a name. Returns the inode that had the new name before.
    pub fn rename(
        &self,
        tree: &mut Tree,
        from: (InodeNumber, &FileName),
        to: (InodeNumber, &FileName),
        flags: RenameFlags,
    ) -> Result<Option<InodeNumber>, Errno> {
        let moved = tree.child(from.0, from.1)?;
        let replaced = tree.child(to.0, to.1).ok();
        let exchange = flags.contains(RenameFlags::RENAME_EXCHANGE);
        if replaced == Some(moved) && !exchange {
            return Ok(None);
        }
        let (old, new) = (self.directory_fd(tree, from.0)?, self.directory_fd(tree, to.0)?);
        if let (Some(replaced), false) = (replaced, exchange) {
            self.keep_nameless(tree, replaced)?;
        }
        let renamed = nix::fcntl::renameat2(old, os(from.1), new, os(to.1), flags);
        if let Err(error) = renamed {
            if let (Some(replaced), false) = (replaced, exchange) {
                tree.node_mut(replaced)?.nameless = None;
            }
            return Err(error);
        }
        tree.unlink(from.0, from.1)?;
        if replaced.is_some() {
            tree.unlink(to.0, to.1)?;
        }
        tree.link(to.0, to.1.clone(), moved)?;
        if let (Some(replaced), true) = (replaced, exchange) {
            tree.link(from.0, from.1.clone(), replaced)?;
        }
        Ok(replaced)
    }

    /// Attributes of an inode as the guest sees them.
    pub fn attributes(
        &self,
        tree: &Tree,
        inode: InodeNumber,
    ) -> Result<(FileStat, NodeAttributes), Errno> {
        let stat = self.node_fd(tree, inode)?.stat()?;
        let (accessed, modified, changed) = times_of(&stat);
        let changed = match tree.node(inode)?.changed {
            Some(carried) if carried.backing == changed => carried.shown,
            _ => changed,
        };
        let attributes = NodeAttributes {
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            accessed,
            modified,
            changed,
        };
        Ok((stat, attributes))
    }

    /// Makes the attributes of an inode those of the other host.
    pub fn set_attributes(
        &self,
        tree: &mut Tree,
        inode: InodeNumber,
        wanted: &NodeAttributes,
    ) -> Result<(), Errno> {
        let fd = self.node_fd(tree, inode)?;
        let stat = fd.stat()?;
        if (stat.st_uid, stat.st_gid) != (wanted.uid, wanted.gid) {
            fd.set_owner(Some(wanted.uid), Some(wanted.gid))?;
        }
        // Read again: a change of owner takes the set-user-ID bit away.
        let node = tree.node_mut(inode)?;
        if node.kind != Kind::Symlink && fd.stat()?.st_mode & 0o7777 != wanted.mode {
            fd.set_mode(wanted.mode)?;
        }
        let spec = |time: FileTime| TimeSpec::new(time.seconds, i64::from(time.nanoseconds));
        fd.set_times(spec(wanted.accessed), spec(wanted.modified))?;
        let backing = times_of(&fd.stat()?).2;
        node.changed = Some(CarriedChangeTime { shown: wanted.changed, backing });
        Ok(())
    }

    /// Fills the empty tree from what is in the backing directory.
    pub fn scan(&self) -> Result<(), FilesError> {
        let mut tree = self.tree_mut();
        let device = nix::sys::stat::fstat(&self.root)
            .map_err(|error| FilesError::backing("read", &self.backing, error))?
            .st_dev;
        let mut hard_links: HashMap<u64, InodeNumber> = HashMap::new();
        let mut directories = vec![InodeNumber::ROOT];
        while let Some(parent) = directories.pop() {
            for (name, stat) in self.list(&tree, parent)? {
                let above = tree.path(parent).unwrap_or_default();
                let path = self.backing.join(OsStr::from_bytes(&above)).join(os(&name));
                let kind = replicable_kind(&stat, device, &path)?;
                let failed = |error| FilesError::backing("read", &path, error);
                let linked = kind != Kind::Directory && stat.st_nlink > 1;
                if linked && let Some(inode) = hard_links.get(&stat.st_ino) {
                    tree.link(parent, name, *inode).map_err(failed)?;
                    continue;
                }
                let inode = tree.allocate();
                hard_links.insert(stat.st_ino, inode);
                tree.add(inode, kind).map_err(failed)?;
                tree.link(parent, name, inode).map_err(failed)?;
                if kind == Kind::Directory {
                    directories.push(inode);
                }
            }
        }
        Ok(())
    }

    /// What the backing directory has in a directory of the tree.
    fn list(
        &self,
        tree: &Tree,
        inode: InodeNumber,
    ) -> Result<BTreeMap<FileName, FileStat>, FilesError> {
        let relative = tree.path(inode).unwrap_or_default();
        let path = self.backing.join(OsStr::from_bytes(&relative));
        let failed = |error: std::io::Error| FilesError::backing("list directory", &path, error);
        let directory = self
            .open_beneath(&relative, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
            .map_err(|error| failed(error.into()))?;
        let mut entries = BTreeMap::new();
        for entry in std::fs::read_dir(proc_path(directory.as_fd())).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let no_follow = AtFlags::AT_SYMLINK_NOFOLLOW;
            let stat = nix::sys::stat::fstatat(&directory, name.as_os_str(), no_follow)
                .map_err(|error| failed(error.into()))?;
            let name =
                FileName::new(name.as_bytes()).ok_or_else(|| failed(Errno::EINVAL.into()))?;
            entries.insert(name, stat);
        }
        Ok(entries)
    }

    /// Empties the backing directory and the tree; new inodes are numbered from `next` on.
    pub fn clear(&self, next: u64) -> Result<(), FilesError> {
        let mut tree = self.tree_mut();
        tree.clear(next);
        drop(tree);
        self.open_files_mut().clear();
        let mut waiting = vec![(Vec::new(), false)];
        while let Some((path, emptied)) = waiting.pop() {
            let message = self.backing.join(OsStr::from_bytes(&path));
            let failed = |error: Errno| FilesError::backing("empty directory", &message, error);
            if emptied {
                let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
                    Some(slash) => (&path[..slash], &path[slash + 1..]),
                    None => (&b""[..], &path[..]),
                };
                let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
                let directory = self.open_beneath(parent, flags).map_err(failed)?;
                unlinkat(directory, OsStr::from_bytes(name), UnlinkatFlags::RemoveDir)
                    .map_err(failed)?;
                continue;
            }
            if !path.is_empty() {
                waiting.push((path.clone(), true));
            }
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
            let directory = self.open_beneath(&path, flags).map_err(failed)?;
            let entries = std::fs::read_dir(proc_path(directory.as_fd()))
                .map_err(|error| FilesError::backing("empty directory", &message, error))?;
            for entry in entries {
                let entry = entry
                    .map_err(|error| FilesError::backing("empty directory", &message, error))?;
                let name = entry.file_name();
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    let separator: &[u8] = if path.is_empty() { b"" } else { b"/" };
                    waiting.push(([&path[..], separator, name.as_bytes()].concat(), false));
                } else {
                    unlinkat(&directory, name.as_os_str(), UnlinkatFlags::NoRemoveDir)
                        .map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    /// Writes a directory's entries to the disk.
    pub fn sync_directory(&self, inode: InodeNumber) -> Result<(), Errno> {
        let Some(path) = self.tree().path(inode) else { return Ok(()) };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        nix::unistd::fsync(self.open_beneath(&path, flags)?)
    }
}

/// Gives a just made inode its owner and mode. Directories keep an inherited set-group-ID bit.
fn set_up(directory: &OwnedFd, name: &FileName, new: &NewNode) -> Result<(), Errno> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let fd = NodeFd::Path(nix::fcntl::openat(directory, os(name), flags, Mode::empty())?);
    fd.set_owner(Some(new.uid), Some(new.gid))?;
    match new.kind {
        NodeKind::Symlink(_) => Ok(()),
        NodeKind::Regular | NodeKind::Directory | NodeKind::Fifo | NodeKind::Socket => {
            fd.set_mode(new.mode)
        }
    }
}

fn replicable_kind(stat: &FileStat, device: u64, path: &Path) -> Result<Kind, FilesError> {
    let refuse = |what| Err(FilesError::Unreplicable { path: path.to_owned(), what });
    if stat.st_dev != device {
        return refuse("on another file system");
    }
    match SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits()) {
        SFlag::S_IFREG => Ok(Kind::Regular),
        SFlag::S_IFDIR => Ok(Kind::Directory),
        SFlag::S_IFLNK => Ok(Kind::Symlink),
        SFlag::S_IFIFO => Ok(Kind::Fifo),
        SFlag::S_IFSOCK => Ok(Kind::Socket),
        SFlag::S_IFBLK => refuse("a block device"),
        SFlag::S_IFCHR => refuse("a character device"),
        _ => refuse("of an unknown kind"),
    }
}
