"""What can go wrong on the GPU side, each as one clear exception."""


class DeviceError(RuntimeError):
    """No adapter, a limit exceeded, a failed allocation or a shader the driver refuses."""


class DeviceLostError(DeviceError):
    """The GPU device was lost during a call. The next call starts a new device."""
