//! Regular files: path, offset, flags, locks. The bytes are the business of the directory's
//! standing (`--files`).

use std::os::fd::{AsFd, OwnedFd};

use hotspare_image::objects::{FileLock, LockKind, RegularFile};
use hotspare_image::tree::HostPath;
use hotspare_kernel::descriptor;

use super::class::Known;
use super::error::{ObjectError, ObjectResult};
use super::fdinfo::Header;
use super::restore::{RestoreContext, seek};
use super::rules::{FileRules, Standing};

fn writes(flags: u32) -> bool {
    let only_path = flags & libc::O_PATH as u32 != 0;
    !only_path && flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32
}

/// The image of a file with the `locks` that all its holders show.
pub fn capture(
    known: &Known,
    header: &Header,
    locks: Vec<FileLock>,
    rules: &FileRules,
) -> ObjectResult<RegularFile> {
    let path = &known.path;
    let standing = rules.standing(path);
    let mut unlinked_inode = None;
    match standing {
        Standing::Compared if writes(header.flags) => {
            let reason = "it is open for writing, and its directory is neither shared nor \
                replicated; name the directory with --files replicate:DIR or --files shared:DIR";
            return Err(ObjectError::refused(path, reason));
        }
        Standing::Compared if known.deleted => {
            let reason = "it was deleted while open, so the spare cannot have it; restart the \
                program, or name its directory with --files replicate:DIR";
            return Err(ObjectError::refused(path, reason));
        }
        Standing::Shared if known.deleted => {
            let reason = "it was deleted while open, and on shared storage nobody else can open \
                it then; name its directory with --files replicate:DIR";
            return Err(ObjectError::refused(path, reason));
        }
        Standing::Replicated if known.deleted => unlinked_inode = Some(header.inode),
        Standing::Compared | Standing::Shared | Standing::Replicated => {}
    }
    let bytes = match standing {
        Standing::Compared => known.stat.map_or(0, |stat| stat.bytes),
        // They may grow until the checkpoint is taken; nothing is compared.
        Standing::Shared | Standing::Replicated => 0,
    };
    let path = HostPath(path.clone());
    Ok(RegularFile { path, unlinked_inode, offset: header.position, locks, bytes })
}

/// Opens it again and takes the locks that belong to the description. Locks of processes
/// (`LockKind::Posix`) are taken by the processes: [`super::remote_step`].
pub fn restore(
    image: &RegularFile,
    flags: u32,
    context: &RestoreContext<'_>,
) -> ObjectResult<OwnedFd> {
    // Left from O_TMPFILE, of which it is a part.
    let flags = flags & !(libc::O_DIRECTORY as u32);
    let file = match image.unlinked_inode {
        Some(inode) => context.open_unlinked(&image.path, inode, flags)?,
        None => context.open(&image.path, flags)?,
    };
    if flags & libc::O_PATH as u32 != 0 {
        return Ok(file);
    }
    let stat = descriptor::stat(file.as_fd())?;
    if stat.kind() != libc::S_IFREG {
        return Err(ObjectError::refused(&image.path.0, "it is no regular file on this host"));
    }
    let compared = context.rules.standing(&image.path.0) == Standing::Compared;
    if compared && stat.bytes != image.bytes {
        let reason = format!(
            "it has {} bytes on this host and {} on the other; make them equal",
            stat.bytes, image.bytes
        );
        return Err(ObjectError::refused(&image.path.0, reason));
    }
    seek(&file, image.offset)?;
    for lock in &image.locks {
        let taken = match lock.kind {
            LockKind::Posix => Ok(()),
            LockKind::OpenFile => {
                descriptor::lock_range(file.as_fd(), lock.exclusive, lock.start, lock.length)
            }
            LockKind::Flock => descriptor::lock_whole(file.as_fd(), lock.exclusive),
        };
        taken.map_err(ObjectError::kernel(format!("lock of {}", image.path.0)))?;
    }
    Ok(file)
}
