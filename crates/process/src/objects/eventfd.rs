//! eventfd(2): a counter. All of it is in fdinfo.

use std::os::fd::OwnedFd;

use hotspare_image::objects::EventFd;
use hotspare_kernel::descriptor;

use super::error::ObjectResult;
use super::fdinfo;
use super::restore::set_flags;

/// Reads the counter from fdinfo.
pub fn capture(detail: &[u8]) -> ObjectResult<EventFd> {
    let count = fdinfo::hexadecimal(fdinfo::field(detail, "eventfd-count")?)?;
    let semaphore = fdinfo::decimal(fdinfo::field(detail, "eventfd-semaphore")?)? != 0;
    Ok(EventFd { count, semaphore })
}

/// Makes it anew. A count of `u64::MAX`, which only the kernel itself can reach, becomes one less:
/// write(2) allows no more, and poll(2) shows the same but for `POLLERR`.
pub fn restore(image: &EventFd, flags: u32) -> ObjectResult<OwnedFd> {
    let kind = if image.semaphore { libc::EFD_SEMAPHORE } else { 0 };
    let file = descriptor::eventfd(image.count.min(u64::MAX - 1), kind)?;
    set_flags(&file, flags)?;
    Ok(file)
}
