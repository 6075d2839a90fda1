// Stands in for ROS 2's message: its fields that a node needs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sensor_msgs::msg {
struct Image {
    using SharedPtr = std::shared_ptr<Image>;
    uint32_t height = 0, width = 0, step = 0;
    std::string encoding;
    std::vector<uint8_t> data;
};
} // namespace sensor_msgs::msg
