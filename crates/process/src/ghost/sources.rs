//! What ghost mappings stand on: files of the guest's tree and shared memory, as our descriptors.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{File, Permissions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;

use hotspare_image::ipc::IpcOwner;
use hotspare_image::memory::{
    AddressSpace, Backing, MappedFile, Mapping, SharedId, SharedKind, SharedMemory,
};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::opener::Opener;
use hotspare_kernel::spawn;

use super::body::{Body, Sources};
use super::error::{GhostError, GhostResult};
use crate::init::GuestNamespaces;
use crate::objects::ipc;
use crate::pages::PageRun;

/// A shared memory object. We keep it alive; the ghost's mappings refer to it.
#[derive(Debug)]
pub(super) struct SharedObject {
    file: File,
    reader: File,
    image: SharedMemory,
}

/// Files by path and unlinked inode, and whether they can be written.
type FileKey = (String, Option<u64>, bool);

/// All of them.
#[derive(Debug, Default)]
pub(super) struct SourceSet {
    files: BTreeMap<FileKey, File>,
    shared: BTreeMap<SharedId, SharedObject>,
}

fn key_of(backing: &Backing) -> GhostResult<Option<FileKey>> {
    let (file, writable) = match backing {
        Backing::PrivateFile { file, .. } => (file, false),
        Backing::SharedFile { file, writable, .. } => (file, *writable),
        Backing::Anonymous | Backing::SharedMemory { .. } | Backing::Special { .. } => {
            return Ok(None);
        }
    };
    let MappedFile { path, unlinked_inode, open_file } = file;
    if open_file.is_some() && unlinked_inode.is_none() && path.0.is_empty() {
        let reason = "it has no name any more; keep such files in a replicated directory";
        return Err(GhostError::refused("a mapped file", reason));
    }
    Ok(Some((path.0.clone(), *unlinked_inode, writable)))
}

fn program_key(space: &AddressSpace) -> FileKey {
    (space.exe.0.clone(), None, false)
}

impl SourceSet {
    /// Opens every file that `spaces` map and that is not open yet, in the guest's mount tree.
    /// `roots` are the replicated directories, for files without a name.
    pub(super) fn open_files<'a>(
        &mut self,
        spaces: impl Iterator<Item = &'a AddressSpace>,
        namespaces: &GuestNamespaces,
        roots: &[String],
    ) -> GhostResult<()> {
        let mut wanted = Vec::new();
        for space in spaces {
            let mapped = space.mappings.iter().map(|mapping| key_of(&mapping.backing));
            for key in mapped.chain([Ok(Some(program_key(space)))]) {
                if let Some(key) = key?
                    && !self.files.contains_key(&key)
                    && !wanted.contains(&key)
                {
                    wanted.push(key);
                }
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let opened = namespaces
            .run(|| open_all(wanted, roots))
            .map_err(GhostError::io("enter the guest's namespaces"))?
            .map_err(GhostError::io("start to open mapped files"))?;
        for (file, key) in opened {
            let file = file.map_err(GhostError::io(format!("open mapped file {}", key.0)))?;
            self.files.insert(key, file);
        }
        Ok(())
    }

    /// The program of an address space.
    pub(super) fn program(&self, space: &AddressSpace) -> Option<BorrowedFd<'_>> {
        self.files.get(&program_key(space)).map(AsFd::as_fd)
    }

    /// Closes the files; mappings keep what they need.
    pub(super) fn close_files(&mut self) {
        self.files.clear();
    }

    /// Makes, resizes, empties and drops shared memory as the checkpoint says. `keep` says that
    /// what exists is from the same full transfer: a reset does not empty it.
    pub(super) fn sync_shared(
        &mut self,
        all: &[SharedMemory],
        keep: bool,
        namespaces: &GuestNamespaces,
        bodies: &BTreeMap<GuestPid, Body>,
    ) -> GhostResult<()> {
        let gone = |id: &SharedId| !all.iter().any(|image| image.id == *id);
        for (_, object) in self.shared.extract_if(.., |id, _| gone(id)) {
            remove_segment(&object.image, namespaces)?;
        }
        for image in all {
            let old = self.shared.get(&image.id);
            let resize = old.is_some_and(|old| old.image.bytes != image.bytes);
            let segment = matches!(image.kind, SharedKind::SysV { .. });
            match old {
                // Its number is taken: emptied, not made anew.
                Some(old) if image.reset && !keep && segment => empty(&old.file, image.bytes)?,
                Some(_) if !image.reset || keep => {}
                _ => {
                    let object = make(image, namespaces, bodies)?;
                    self.shared.insert(image.id, object);
                }
            }
            let Some(object) = self.shared.get_mut(&image.id) else { continue };
            if resize {
                object.file.set_len(image.bytes).map_err(GhostError::io("resize shared memory"))?;
            }
            object.image.clone_from(image);
        }
        Ok(())
    }

    /// Applies pages of shared memory; those of objects that are gone are skipped.
    pub(super) fn fill_shared(&self, id: SharedId, run: &PageRun) -> GhostResult<()> {
        match self.shared.get(&id) {
            Some(object) => super::fill::fill_shared(&object.file, object.image.bytes, run),
            None => Ok(()),
        }
    }

    /// A shared memory object's descriptor, open for reading and writing.
    pub(super) fn shared(&self, id: SharedId) -> Option<BorrowedFd<'_>> {
        self.shared.get(&id).map(|object| object.file.as_fd())
    }

    /// All of them.
    pub(super) fn all_shared(&self) -> impl Iterator<Item = (SharedId, BorrowedFd<'_>)> {
        self.shared.iter().map(|(id, object)| (*id, object.file.as_fd()))
    }

    /// Sets what would have hindered the filling: seals, and the removal of segments that go with
    /// their last process.
    pub(super) fn seal(&self, namespaces: &GuestNamespaces) -> GhostResult<()> {
        for object in self.shared.values() {
            if let SharedKind::SysV { mode, .. } = object.image.kind
                && mode & ipc::SEGMENT_REMOVED != 0
            {
                remove_segment(&object.image, namespaces)?;
            }
            if let SharedKind::Memfd { seals, .. } = &object.image.kind
                && *seals != 0
            {
                let seals = nix::fcntl::SealFlag::from_bits_retain(*seals as i32);
                nix::fcntl::fcntl(&object.file, nix::fcntl::FcntlArg::F_ADD_SEALS(seals))
                    .map_err(|errno| GhostError::io("seal memfd")(errno.into()))?;
            }
        }
        Ok(())
    }
}

impl Sources for SourceSet {
    fn segment(&self, mapping: &Mapping) -> Option<(i32, u64)> {
        let Backing::SharedMemory { object, private: false, .. } = &mapping.backing else {
            return None;
        };
        match self.shared.get(object)?.image {
            SharedMemory { kind: SharedKind::SysV { id, .. }, bytes, .. } => Some((id, bytes)),
            _ => None,
        }
    }

    fn descriptor(&self, mapping: &Mapping) -> GhostResult<BorrowedFd<'_>> {
        if let Backing::SharedMemory { object, writable, private, .. } = &mapping.backing {
            let found = self.shared.get(object).ok_or_else(|| {
                GhostError::Image(format!("mapping of unknown shared memory {}", object.0))
            })?;
            // Once it is sealed, only mappings that can never be written to exist.
            let sealed = matches!(
                found.image.kind,
                SharedKind::Memfd { seals, .. } if seals & libc::F_SEAL_WRITE as u32 != 0
            );
            let writes = *writable && !private && !sealed;
            let file = if writes { &found.file } else { &found.reader };
            return Ok(file.as_fd());
        }
        let found = key_of(&mapping.backing)?.and_then(|key| self.files.get(&key));
        found
            .map(AsFd::as_fd)
            .ok_or_else(|| GhostError::Image(format!("mapping {:?} has no file", mapping.range)))
    }
}

type Opened = (std::io::Result<File>, FileKey);

/// Opens all, those in directories of our own by an [`Opener`].
fn open_all(wanted: Vec<FileKey>, roots: &[String]) -> std::io::Result<Vec<Opened>> {
    let opener = if roots.is_empty() { None } else { Some(Opener::start()?) };
    let each = wanted.into_iter().map(|key| (open(&key, roots, opener.as_ref()), key));
    Ok(each.collect())
}

fn open(key: &FileKey, roots: &[String], opener: Option<&Opener>) -> std::io::Result<File> {
    let (path, unlinked, writable) = key;
    let root = roots.iter().find(|root| std::path::Path::new(path).starts_with(root));
    let flags = if *writable { libc::O_RDWR } else { libc::O_RDONLY };
    match (unlinked, root.or(roots.first()), opener) {
        (Some(inode), Some(root), Some(opener)) => {
            Ok(opener.open_inode(root.as_ref(), *inode, flags)?.into())
        }
        (Some(_), _, _) => Err(std::io::Error::other("no replicated directory")),
        (None, _, Some(opener)) if root.is_some() => Ok(opener.open(path.as_ref(), flags)?.into()),
        (None, _, _) => File::options().read(true).write(*writable).open(path),
    }
}

/// Frees all memory of a segment.
fn empty(file: &File, bytes: u64) -> GhostResult<()> {
    use nix::fcntl::{FallocateFlags, fallocate};
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, flags, 0, bytes as i64)
        .map_err(|errno| GhostError::io("empty shared memory segment")(errno.into()))
}

/// Removes the segment of an object that is one.
fn remove_segment(image: &SharedMemory, namespaces: &GuestNamespaces) -> GhostResult<()> {
    let SharedKind::SysV { id, .. } = image.kind else { return Ok(()) };
    Ok(ipc::inside(namespaces.ipc.as_fd(), || ipc::remove_segment(id))?)
}

/// Makes a segment, by its creator if that has a ghost: the kernel remembers who it was.
fn make_segment(
    image: &SharedMemory,
    namespaces: &GuestNamespaces,
    bodies: &BTreeMap<GuestPid, Body>,
) -> GhostResult<OwnedFd> {
    let SharedKind::SysV { id, key, mode, uid, gid, creator } = image.kind else {
        return Err(GhostError::Image("a segment of another kind".into()));
    };
    let owner = IpcOwner { id, key, mode, uid, gid };
    let (bytes, last_use) = (image.bytes, [0; 4]);
    let namespace = namespaces.ipc.as_fd();
    let Some(body) = bodies.get(&creator).filter(|body| !body.zombie) else {
        let segment = ipc::Segment { owner, bytes, creator, last_use };
        return Ok(ipc::inside(namespace, || ipc::restore_segment(&segment))?.into());
    };
    ipc::inside(namespace, || ipc::ask_for_segment(id))?;
    let flags = libc::IPC_CREAT | libc::IPC_EXCL | (mode & 0o777) as i32;
    let arguments = [key as u64, bytes, flags as u64];
    let made = body.batch().ask("create segment", libc::SYS_shmget, &arguments);
    let made = made.map_err(|error| GhostError::at(creator)(error.into()))?;
    Ok(ipc::inside(namespace, || ipc::adopt_segment(&owner, made as i32))?.into())
}

fn make(
    image: &SharedMemory,
    namespaces: &GuestNamespaces,
    bodies: &BTreeMap<GuestPid, Body>,
) -> GhostResult<SharedObject> {
    let fd: OwnedFd = match &image.kind {
        SharedKind::Anonymous => spawn::shared_anonymous(image.bytes)?,
        SharedKind::Memfd { name, .. } => {
            let name = CString::new(name.as_str())
                .map_err(|_| GhostError::Image("memfd name with a zero byte".into()))?;
            spawn::memfd(&name)?
        }
        SharedKind::SysV { .. } => make_segment(image, namespaces, bodies)?,
    };
    let file = File::from(fd);
    if let SharedKind::Memfd { mode, .. } = &image.kind {
        file.set_len(image.bytes).map_err(GhostError::io("size shared memory"))?;
        file.set_permissions(Permissions::from_mode(*mode))
            .map_err(GhostError::io("set mode of memfd"))?;
    }
    let reader = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(GhostError::io("open shared memory for reading"))?;
    Ok(SharedObject { file, reader, image: image.clone() })
}
