//! Directories. The position within is the file system's own cookie: it means the same on a host
//! that shares or replicates the directory; in a directory that is merely compared, a listing that
//! was half read may repeat or miss names.

use std::os::fd::{AsFd, OwnedFd};

use hotspare_image::objects::DirectoryFile;
use hotspare_image::tree::HostPath;
use hotspare_kernel::descriptor;

use super::class::Known;
use super::error::{ObjectError, ObjectResult};
use super::restore::{RestoreContext, seek};

/// The image: path and position.
pub fn capture(known: &Known, offset: u64) -> ObjectResult<DirectoryFile> {
    if known.deleted {
        let reason = "an open directory was removed; it cannot be opened again";
        return Err(ObjectError::refused(&known.path, reason));
    }
    Ok(DirectoryFile { path: HostPath(known.path.clone()), offset })
}

/// Opens it again.
pub fn restore(
    image: &DirectoryFile,
    flags: u32,
    context: &RestoreContext<'_>,
) -> ObjectResult<OwnedFd> {
    let file = context.open(&image.path, flags | libc::O_DIRECTORY as u32)?;
    if descriptor::stat(file.as_fd())?.kind() != libc::S_IFDIR {
        return Err(ObjectError::refused(&image.path.0, "it is no directory on this host"));
    }
    if image.offset != 0 && flags & libc::O_PATH as u32 == 0 {
        seek(&file, image.offset)?;
    }
    Ok(file)
}
