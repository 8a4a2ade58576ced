//! A primary and a spare on this machine, each with a backing directory and a mount.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use hotspare_files::{LogLimits, ReplicatedDir, Role};
use tempfile::TempDir;

/// One host's half.
pub struct Host {
    pub dir: ReplicatedDir,
    pub backing: PathBuf,
    pub mount: PathBuf,
    _temporary: TempDir,
}

impl Host {
    pub fn new(role: Role, fill: impl FnOnce(&Path)) -> Host {
        Host::with_limits(role, LogLimits::default(), fill)
    }

    pub fn with_limits(role: Role, limits: LogLimits, fill: impl FnOnce(&Path)) -> Host {
        let temporary = tempfile::tempdir().unwrap();
        let (backing, mount) = (temporary.path().join("backing"), temporary.path().join("mount"));
        fs::create_dir(&backing).unwrap();
        fs::create_dir(&mount).unwrap();
        fill(&backing);
        let dir = ReplicatedDir::serve_with(&backing, &mount, role, limits).unwrap();
        Host { dir, backing, mount, _temporary: temporary }
    }
}

/// A primary and a spare that has its initial copy.
pub struct Pair {
    pub primary: Host,
    pub spare: Host,
}

impl Pair {
    pub fn new() -> Pair {
        Pair::filled(|_| {})
    }

    pub fn filled(fill: impl FnOnce(&Path)) -> Pair {
        let pair =
            Pair { primary: Host::new(Role::Primary, fill), spare: Host::new(Role::Spare, |_| {}) };
        copy(&pair.primary, &pair.spare);
        pair.checkpoint();
        assert!(pair.spare.dir.is_complete());
        pair
    }

    /// Path of a file as the guest on the primary names it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.primary.mount.join(name)
    }

    /// Path of the same file on the spare.
    pub fn copy_of(&self, name: &str) -> PathBuf {
        self.spare.mount.join(name)
    }

    /// Flush, cut, send, apply.
    pub fn checkpoint(&self) {
        checkpoint(&self.primary, &[&self.spare]);
    }

    pub fn assert_equal(&self) {
        assert_equal(&self.primary.mount, &self.spare.mount);
    }
}

/// Sends an initial copy.
pub fn copy(primary: &Host, spare: &Host) {
    for chunk in primary.dir.initial_copy().chunks(64 << 10) {
        spare.dir.copy_chunk(&chunk.unwrap()).unwrap();
    }
}

/// Flush, cut, send to all, apply.
pub fn checkpoint(primary: &Host, spares: &[&Host]) {
    primary.dir.flush().unwrap();
    let set = primary.dir.cut().unwrap();
    for spare in spares {
        let mut staged = spare.dir.staging();
        for chunk in set.chunks(64 << 10) {
            staged.push_chunk(&chunk.unwrap()).unwrap();
        }
        spare.dir.apply(&staged).unwrap();
    }
}

/// Everything about a file that must be equal on both hosts.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    inode: u64,
    mode: u32,
    links: u64,
    owner: (u32, u32),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    content: Option<Vec<u8>>,
    target: Option<PathBuf>,
    listing: Option<Vec<OsString>>,
    special: bool,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

fn see(path: &Path) -> Seen {
    let meta = fs::symlink_metadata(path).unwrap();
    let kind = meta.file_type();
    Seen {
        inode: meta.ino(),
        mode: meta.mode(),
        links: meta.nlink(),
        owner: (meta.uid(), meta.gid()),
        size: meta.size(),
        modified: (meta.mtime(), meta.mtime_nsec()),
        changed: (meta.ctime(), meta.ctime_nsec()),
        content: kind.is_file().then(|| fs::read(path).unwrap()),
        target: kind.is_symlink().then(|| fs::read_link(path).unwrap()),
        listing: kind
            .is_dir()
            .then(|| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect()),
        special: kind.is_fifo() || kind.is_socket(),
        xattrs: if kind.is_file() { xattrs(path) } else { Vec::new() },
    }
}

fn xattrs(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let file = fs::File::open(path).unwrap();
    let names = hotspare_kernel::list_xattrs(&file).unwrap();
    let mut found = Vec::new();
    for name in names.split_inclusive(|byte| *byte == 0) {
        let name = std::ffi::CStr::from_bytes_with_nul(name).unwrap();
        let value = hotspare_kernel::get_xattr(&file, name).unwrap();
        found.push((name.to_bytes().to_vec(), value));
    }
    found.sort();
    found
}

/// All files below `root`, by relative path.
pub fn tree(root: &Path) -> BTreeMap<PathBuf, Seen> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![PathBuf::new()];
    while let Some(relative) = waiting.pop() {
        let seen = see(&root.join(&relative));
        for name in seen.listing.iter().flatten() {
            waiting.push(relative.join(name));
        }
        found.insert(relative, seen);
    }
    found
}

/// Panics unless two trees are equal in everything.
pub fn assert_equal(one: &Path, other: &Path) {
    let (one, other) = (tree(one), tree(other));
    let names = |tree: &BTreeMap<PathBuf, Seen>| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&one), names(&other));
    for (path, seen) in &one {
        let copy = &other[path];
        if let (Some(a), Some(b)) = (&seen.content, &copy.content)
            && a != b
        {
            let at = a.iter().zip(b).position(|(x, y)| x != y);
            panic!("{path:?} differs: {} and {} bytes, first at {at:?}", a.len(), b.len());
        }
        assert!(seen == copy, "{path:?}: {seen:?} but the copy is {copy:?}");
    }
}
