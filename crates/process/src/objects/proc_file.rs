//! Files of /proc and /sys: made by the kernel at each read, so opening them again is enough. The
//! guest has its own /proc, with its own numbers.

use std::os::fd::OwnedFd;

use hotspare_image::objects::ProcFile;
use hotspare_image::tree::HostPath;

use super::class::Known;
use super::error::{ObjectError, ObjectResult};
use super::restore::{RestoreContext, seek};

/// The image: path and offset.
pub fn capture(known: &Known, offset: u64) -> ObjectResult<ProcFile> {
    if known.deleted {
        let reason = "the process it told of has ended";
        return Err(ObjectError::transient(&known.path, reason));
    }
    Ok(ProcFile { path: HostPath(known.path.clone()), offset })
}

/// Opens it again.
pub fn restore(
    image: &ProcFile,
    flags: u32,
    context: &RestoreContext<'_>,
) -> ObjectResult<OwnedFd> {
    let file = context.open(&image.path, flags)?;
    if image.offset != 0 {
        seek(&file, image.offset)?;
    }
    Ok(file)
}
