//! signalfd(2): a set of signals. The signals themselves wait at the processes.

use std::os::fd::OwnedFd;

use hotspare_image::objects::SignalFd;
use hotspare_kernel::descriptor;

use super::error::ObjectResult;
use super::fdinfo;
use super::restore::set_flags;

/// Reads the set from fdinfo.
pub fn capture(detail: &[u8]) -> ObjectResult<SignalFd> {
    Ok(SignalFd { mask: fdinfo::hexadecimal(fdinfo::field(detail, "sigmask")?)? })
}

/// Makes it anew.
pub fn restore(image: &SignalFd, flags: u32) -> ObjectResult<OwnedFd> {
    let file = descriptor::signalfd(image.mask, 0)?;
    set_flags(&file, flags)?;
    Ok(file)
}
