//! memfd_create(2): an open file description on a shared memory object. The object itself, its
//! bytes, name and seals travel as shared memory.

use std::os::fd::{BorrowedFd, OwnedFd};

use hotspare_image::memory::{SharedId, SharedKind};
use hotspare_image::objects::MemfdFile;
use hotspare_kernel::descriptor;

use super::class::Known;
use super::error::{ObjectError, ObjectResult};
use super::restore::{RestoreContext, seek, set_flags};

/// What the open memfd says of its memory: its kind and its size in bytes.
pub fn memory(known: &Known, memfd: BorrowedFd<'_>) -> ObjectResult<(SharedKind, u64)> {
    let name = known.path.strip_prefix("/memfd:").unwrap_or(&known.path).to_owned();
    let stat = descriptor::stat(memfd)?;
    let seals = descriptor::seals(memfd)?;
    Ok((SharedKind::Memfd { name, seals, mode: stat.mode & 0o7777 }, stat.bytes))
}

/// The image of one open file description.
pub fn capture(object: SharedId, offset: u64) -> MemfdFile {
    MemfdFile { object, offset }
}

/// Opens the memory once more, so that offset and flags are this description's own.
pub fn restore(
    image: &MemfdFile,
    flags: u32,
    context: &RestoreContext<'_>,
) -> ObjectResult<OwnedFd> {
    let memory = context
        .parts
        .shared(image.object)
        .ok_or_else(|| ObjectError::Image(format!("no shared memory object {}", image.object)))?;
    let file = context.reopen(memory, flags)?;
    seek(&file, image.offset)?;
    set_flags(&file, flags)?;
    Ok(file)
}
